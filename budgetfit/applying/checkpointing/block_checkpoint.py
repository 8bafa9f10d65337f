"""Wrapped forward of one block: checkpointing, selective checkpointing or offload."""

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint, noop_context_fn

from budgetfit.applying.checkpointing.activation_offload import (
    offload_checkpoint_input,
    run_with_offload,
)
from budgetfit.applying.checkpointing.recomputation_state import RepeatableForwards
from budgetfit.applying.checkpointing.segment_checkpoint import SegmentCheckpoint
from budgetfit.applying.checkpointing.selective import SelectiveCheckpoint
from budgetfit.applying.pytree import tensors_in
from budgetfit.errors import InputError

# A model may be compiled around its blocks: torch.compile would trace the checkpoints,
# and fail or save other tensors than planned. As torch.compiler.disable, but dynamo
# (seconds to import) is imported at the first call.
_eager = _disable_dynamo

# What transformers' layers drop where they train (``modeling_layers``).
_CACHES = ("past_key_values", "layer_past")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """How one block is called.

    Attributes:
        random: Whether the RNG state is preserved for the recomputation.
        check: ``determinism_check`` of ``checkpoint.apply_segments``.
        saved: The op calls that selective checkpointing saves.
        offload: Offload saved tensors instead of recomputing.
        input_on_host: Whether the checkpoint's input is offloaded.
        repeats: Makes the block's forwards repeatable.
        run_to_end: No early stop of a recomputation; an offload copies after forward.
    """

    block: nn.Module
    random: bool
    check: str
    saved: SelectiveCheckpoint | None = None
    offload: bool = False
    input_on_host: bool = False
    repeats: RepeatableForwards
    run_to_end: bool = False

    @_eager
    def __call__(
        self, function: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Call ``function``, the block's forward, checkpointed or offloaded."""
        if self.offload:
            return run_with_offload(
                function, args, kwargs, module=self.block, after_forward=self.run_to_end
            )
        if next(tensors_in(args), None) is None:
            # Torch preserves the RNG state of the devices of positional tensors only:
            # with keyword tensors alone, dropout would differ in the recomputation.
            function, args, kwargs = _keywords_first(function, args, kwargs)
        return self._checkpoint(function, args, kwargs)

    def call_nested(
        self, function: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Call ``function`` in a checkpoint nested in another checkpoint."""
        # Keyword tensors would be kept alive by reference, although the outer
        # checkpoint is to drop them; positional ones are saved through its hooks.
        function, args, kwargs = _keywords_first(function, args, kwargs)
        return self._checkpoint(function, args, kwargs)

    def _checkpoint(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, Any],
    ) -> object:
        """Call torch's non-reentrant checkpoint."""
        # With early stop, selectively saved ops after the last tensor that backward
        # needs would be kept until the block's graph is freed, so a plan does not save
        # them.
        x = next(tensors_in(args), None)
        moving = self.input_on_host and x is not None and torch.is_grad_enabled()
        with offload_checkpoint_input(x) if moving and x is not None else nullcontext():
            del x
            return checkpoint(
                self.repeats.forward(function),
                *args,
                use_reentrant=False,
                preserve_rng_state=self.random,
                determinism_check="none" if self.check == "none" else "default",
                early_stop=not self.run_to_end,
                context_fn=(
                    noop_context_fn if self.saved is None else self.saved.contexts
                ),
                **kwargs,
            )


class CheckpointedForward:
    """Replacement of one block's ``forward``.

    An object rather than a closure, so that a deep copy of the model is independent.
    ``__wrapped__`` is the block's forward, for ``inspect.signature``. ``position``,
    ``repeats`` and ``nested`` are of the block in a segment of several.
    """

    def __init__(  # noqa: PLR0913 - a block and its place in a segment
        self,
        call: BlockCall,
        plain: Callable[..., object],
        segment: SegmentCheckpoint | None = None,
        position: int = 0,
        *,
        repeats: RepeatableForwards | None = None,
        nested: bool = False,
    ) -> None:
        functools.update_wrapper(self, plain)
        self.__wrapped__ = plain
        self._call = call
        self._segment = segment
        self._position = position
        self._repeats = repeats
        self._nested = nested
        self._emptied: weakref.ref[Any] | None = None  # the last cache left out

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cache of the last forward, which copies have none of."""
        return {**vars(self), "_emptied": None}

    @_eager
    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the block."""
        if _allows_no_hooks():
            return self.__wrapped__(*args, **kwargs)
        if not self._call.block.training and any(map(_is_cache, kwargs.values())):
            return self.__wrapped__(*args, **kwargs)  # as transformers' layers do
        if not self._call.offload:
            kwargs = self._without_cache(kwargs)
        if self._segment is None or self._repeats is None:
            return self._call(self.__wrapped__, *args, **kwargs)
        forward = self.__wrapped__
        if self._nested:
            forward = functools.partial(self._call.call_nested, forward)
        return self._segment.call(
            self._position,
            self._repeats.forward(forward),
            args,
            kwargs,
            random=self._call.random,
        )

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Remove generation caches from the arguments, as transformers' layers do.

        A recomputation would write to them a second time.

        Raises:
            InputError: If they hold earlier tokens, or would if they had not been
                removed, which the block would run without.
        """
        block = self._call.block
        is_layer = _is_transformers_layer(block)
        keeps = getattr(block, "_can_checkpoint_with_cache", False)
        names = _CACHES if is_layer else tuple(kwargs)
        caches = [kwargs[name] for name in names if _is_cache(kwargs.get(name))]
        if not torch.is_grad_enabled():
            return kwargs
        if is_layer and kwargs.get("use_cache"):
            kwargs = {**kwargs, "use_cache": False}
        if not caches or keeps:
            return kwargs
        before = None if self._emptied is None else self._emptied()
        if any(each is before or _holds_tokens(each, block) for each in caches):
            raise InputError(
                "A block that is to be recomputed gets keys and values of earlier "
                "tokens (past_key_values), as in peft's prefix tuning. A recomputation "
                "would write to them a second time, and without them something else "
                "would train. Keep or offload such blocks: leave them out of the "
                "Recipe's segments, as budgetfit.plan does."
            )
        self._emptied = weakref.ref(caches[-1])
        warnings.warn(
            "Blocks that are recomputed write no keys and values to a generation cache "
            "while they train, and something asked for one (use_cache=True): the "
            "outputs' past_key_values lack them. Keep or offload these blocks if a "
            "later forward is to read it.",
            stacklevel=4,
        )
        return {
            name: None if any(value is each for each in caches) else value
            for name, value in kwargs.items()
        }


def _allows_no_hooks() -> bool:
    """Whether hooks for saved tensors are disabled, which a checkpoint consists of."""
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None:
        return False
    warnings.warn(
        "Blocks keep their activations under torch.func.grad and the like, where torch "
        "allows no hooks for saved tensors. Gradients are the same, and more memory is "
        "used than planned.",
        stacklevel=3,
    )
    return True


def _is_transformers_layer(block: nn.Module) -> bool:
    """Whether the block is a transformers ``GradientCheckpointingLayer``."""
    layers = sys.modules.get("transformers.modeling_layers")  # if not imported, no
    return layers is not None and isinstance(block, layers.GradientCheckpointingLayer)


def _keywords_first(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., object], tuple[object, ...], dict[str, Any]]:
    """Turn keyword tensor arguments into positional ones."""
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    rest = {name: value for name, value in kwargs.items() if name not in names}
    given = len(args)

    def call(*values: object, **others: object) -> Any:
        named = dict(zip(names, values[given:], strict=True))
        return function(*values[:given], **named, **others)

    return call, (*args, *(kwargs[name] for name in names)), rest


def _holds_tokens(value: Any, block: nn.Module) -> bool:
    """Whether a generation cache has tokens of this block's layer already."""
    numbers = (getattr(module, "layer_idx", None) for module in block.modules())
    number = next((each for each in numbers if isinstance(each, int)), None)
    return number is not None and int(value.get_seq_length(number)) > 0


def _is_cache(value: object) -> bool:
    library = sys.modules.get("transformers.cache_utils")
    return library is not None and isinstance(value, library.Cache)
