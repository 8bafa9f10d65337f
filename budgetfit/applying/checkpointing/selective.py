"""Selective activation checkpointing: a policy by op and call index.

The tensors are kept by torch's ``create_selective_checkpoint_contexts``; the policy
selects them by op and number of the call within the block.
"""

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from budgetfit.errors import InputError

_CPU_ATTENTION: Final = "aten._scaled_dot_product_flash_attention_for_cpu.default"

# The CPU's op for each CUDA op of scaled_dot_product_attention (aten/src/ATen/native/
# transformers/attention.cpp): a plan for a GPU saves the attention on a CPU too.
CPU_EQUIVALENTS: Final = {
    "aten._scaled_dot_product_cudnn_attention.default": _CPU_ATTENTION,
    "aten._scaled_dot_product_efficient_attention.default": _CPU_ATTENTION,
    "aten._scaled_dot_product_flash_attention.default": _CPU_ATTENTION,
}

# Of torch's two contexts, which see every op of a block.
_MODES: Final = tuple(map(type, create_selective_checkpoint_contexts([])))
_SHOWN: Final = 4  # calls in a warning
_MUTATED = "has been mutated"  # text of torch's error, _VersionWrapper.get_val
_SECOND_BACKWARD = "backward an extra time"  # the same, _CachedTorchDispatchMode


class SelectiveCheckpoint:
    """Selective checkpointing of one block.

    A call of ``saved_ops`` that does not occur is no error; where none does, a warning
    says so once. ``shares_weights``: whether parameters are tied to others outside.

    Raises:
        InputError: If torch has no such op, or it mutates its arguments: the mutation
            cannot be replaced by a saved result.
    """

    def __init__(
        self, block: str, saved_ops: Iterable[str], *, shares_weights: bool = False
    ) -> None:
        self.block = block
        self.wanted = frozenset(_with_cpu_equivalents(saved_ops))
        self._shares_weights = shares_weights
        self._newest: weakref.ref[_Policy] | None = None
        self._ran_without_grad = False
        self._warned = False
        for name in self.wanted:
            _check_op(block, name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the last forward: copies and pickles of a model have none."""
        return {**vars(self), "_newest": None}

    def contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of one forward and its recomputation (``context_fn``)."""
        # New ones for every forward: they count calls and own the saved tensors.
        # Backward can use them once; torch raises the second time.
        policy = _Policy(self.block, self.wanted)
        saving, reusing = create_selective_checkpoint_contexts(policy)
        if hasattr(saving, "respect_saved_tensors_hooks"):  # torch 2.15 warns if unset
            saving.respect_saved_tensors_hooks = False  # as in earlier versions
        # Autocast caches casts of weights. The recomputation has an empty cache and
        # casts every weight, so the forward must too, or the counts of calls differ:
        # cached casts come from other blocks, or from an earlier call of this one, also
        # under no_grad, of which no policy is left.
        before = self._newest() if self._newest is not None else None
        ran_before = before is not None or self._ran_without_grad
        clears_autocast_cache = self._shares_weights or ran_before
        self._ran_without_grad = not torch.is_grad_enabled()
        self._newest = weakref.ref(policy)
        return _Context(
            policy, saving, clears_autocast_cache, self._warn_of_nothing
        ), _Context(policy, reusing, True)

    def _warn_of_nothing(self, calls: Mapping[Any, int]) -> None:
        """Warn once of a forward that makes none of the calls to save."""
        if self._warned:
            return
        self._warned = True
        made = [
            f"{op}:0 to {count - 1}" if count > 1 else f"{op}:0"
            for op, count in calls.items()
            if not getattr(op, "is_view", False)
        ]
        warnings.warn(
            f"Block {self.block!r} saves nothing and is recomputed whole: its forward "
            f"makes none of its saved_ops ({', '.join(sorted(self.wanted)[:_SHOWN])}). "
            f"It makes {', '.join(made[:_SHOWN])}, for example.",
            stacklevel=2,
        )


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Hide ops from a selective checkpoint around them: the block's are counted."""
    # A forward copies other buffers than its recomputation.
    is_inside = isinstance(_get_current_dispatch_mode(), _MODES)
    with _pop_mode_temporarily() if is_inside else contextlib.nullcontext():
        yield


def draws_random_numbers(
    op: Any, args: tuple[object, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether this call advances an RNG."""
    # Attention has the tag with and without dropout; without it draws nothing.
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            default = kwargs.get("dropout_p", argument.default_value)
            return (args[place] if place < len(args) else default) != 0.0
    return True


def mutated_saved_call(
    op: object, args: tuple[object, ...], kwargs: dict[str, Any], saved: dict[int, str]
) -> str | None:
    """Return the call of ``saved``, by storage, whose result this call mutates."""
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return None
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for tensor in _tensors(value):
            if _storage(tensor) in saved:
                return saved[_storage(tensor)]
    return None


class _Policy:
    """``policy_fn`` that counts the calls of each op.

    Torch up to 2.12 asks again in the recomputation, and gets the same answers because
    every pass counts from 0.
    """

    def __init__(self, block: str, wanted: frozenset[str]) -> None:
        self.block = block
        self._wanted = wanted
        self._saved: dict[int, str] = {}  # storage -> the call that produced it
        self.start()

    def start(self) -> None:
        """Reset the counts for a pass through the block."""
        self.calls: Counter[Any] = Counter()
        self.saves = False
        self._first_saved_draw = ""  # the first saved random call

    def __call__(
        self, context: object, op: Any, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        """Return the policy for one call."""
        call = f"{op}:{self.calls[op]}"
        self.calls[op] += 1
        written = mutated_saved_call(op, args, kwargs, self._saved)
        if written is not None:
            raise InputError(_overwritten(self.block, repr(written), str(op)))
        saved = call in self._wanted
        if (saved or self._first_saved_draw) and draws_random_numbers(op, args, kwargs):
            # A saved random op is not recomputed, so the RNG would be behind at the
            # next one: all after the first saved one are saved, too.
            before = self._first_saved_draw
            if op._schema.is_mutable:
                raise InputError(
                    f"Block {self.block!r} saves the random numbers of {before!r}, and "
                    f"later draws others in place ({op}), which cannot be saved. Leave "
                    f"{before!r} out of its saved_ops."
                )
            self._first_saved_draw = before or call
            saved = True
        if not saved:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.saves = True
        # Torch up to 2.12 asks before the call, without op_output.
        for tensor in _tensors(getattr(context, "op_output", None)):
            self._saved[_storage(tensor)] = call
        return CheckpointPolicy.MUST_SAVE


class _Context:
    """One of torch's two contexts, with counts reset and the autocast cache cleared."""

    def __init__(
        self,
        policy: _Policy,
        mode: Any,
        clears_autocast_cache: bool,
        on_nothing: Callable[[Mapping[Any, int]], None] = lambda _: None,
    ) -> None:
        self._policy = policy
        self._on_nothing = on_nothing
        self._mode = mode
        self._clears_autocast_cache = clears_autocast_cache

    def __enter__(self) -> None:
        self._policy.start()
        if self._clears_autocast_cache and torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()
        self._mode.__enter__()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and _MUTATED in str(error):
            block = self._policy.block
            raise InputError(_overwritten(block, "a tensor", "something")) from error
        if isinstance(error, RuntimeError) and _SECOND_BACKWARD in str(error):
            raise InputError(_ran_twice(self._policy.block)) from error
        if error is None and self._policy.calls and not self._policy.saves:
            self._on_nothing(self._policy.calls)


def _with_cpu_equivalents(saved_ops: Iterable[str]) -> Iterable[str]:
    for name in saved_ops:
        op, _, number = name.rpartition(":")
        yield f"{op}:{int(number)}"
        if op in CPU_EQUIVALENTS:
            yield f"{CPU_EQUIVALENTS[op]}:{int(number)}"


def _check_op(block: str, name: str) -> None:
    parts = name.rpartition(":")[0].split(".")
    if len(parts) != 3:  # noqa: PLR2004 - a higher-order op has no overloads
        return
    space, packet, overload = parts
    op = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
    if op is None:
        raise InputError(
            f"Block {block!r} cannot save {name!r}: this torch {torch.__version__} has "
            "no such op. Write it as torch prints it, for example "
            f'"aten.mm.default:0", or make the plan anew.'
        )
    if op._schema.is_mutable:
        raise InputError(
            f"Block {block!r} cannot save {name!r}: this op writes to its arguments, "
            "and would have to run again. Save an op that makes a new tensor."
        )


def _overwritten(block: str, what: str, by: str) -> str:
    return (
        f"Block {block!r} saves {what}, which {by} then writes to in place. Leave it "
        "out of the block's saved_ops, or compute out of place."
    )


def _ran_twice(block: str) -> str:
    return (
        f"Block {block!r} under selective checkpointing ran backward twice, as where a "
        "model or its loss takes gradients of its own (create_graph=True), or with "
        "retain_graph=True: torch frees what such a block saves after the first. Use "
        "segments of mode='recompute' for it."
    )


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage while it is alive."""
    return tensor.untyped_storage()._cdata


def _tensors(value: object) -> Iterable[torch.Tensor]:
    return (item for item in tree_iter(value) if isinstance(item, torch.Tensor))
