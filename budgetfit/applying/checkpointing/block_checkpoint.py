"""Wrapped forward of one block: checkpointing, selective checkpointing or offload."""

import functools
import sys
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """How one block is called.

    Attributes:
        block: The block.
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
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``function`` in a checkpoint nested in another checkpoint.

        Keyword tensors would be kept alive by reference, although the outer checkpoint
        is to drop them; positional ones are saved through its hooks.
        """
        function, args, kwargs = _keywords_first(function, args, kwargs)
        return self._checkpoint(function, args, kwargs)

    def _checkpoint(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call torch's non-reentrant checkpoint.

        With early stop, selectively saved ops after the last tensor that backward needs
        would be kept until the block's graph is freed, so a plan does not save them.
        """
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
    ``__wrapped__`` is the block's forward, for ``inspect.signature``.

    Args:
        call: How the block is called.
        plain: The block's forward.
        segment: The checkpoint of a segment of several blocks.
        position: The block's index in it.
        repeats: For the block inside the segment's recomputation.
        nested: Whether the block is a nested checkpoint in it.
    """

    def __init__(  # noqa: PLR0913 - a block and its place in a segment
        self,
        call: BlockCall,
        plain: Callable[..., Any],
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

    @_eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if not self._call.block.training and any(map(_is_cache, kwargs.values())):
            return self.__wrapped__(*args, **kwargs)  # as transformers' layers do
        if not self._call.offload:
            kwargs = _without_cache(self._call.block, kwargs)
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


def _is_transformers_layer(block: nn.Module) -> bool:
    """Whether the block is a transformers ``GradientCheckpointingLayer``."""
    layers = sys.modules.get("transformers.modeling_layers")  # if not imported, no
    return layers is not None and isinstance(block, layers.GradientCheckpointingLayer)


def _keywords_first(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Turn keyword tensor arguments into positional ones."""
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    rest = {name: value for name, value in kwargs.items() if name not in names}
    given = len(args)

    def call(*values: Any, **others: Any) -> Any:
        named = dict(zip(names, values[given:], strict=True))
        return function(*values[:given], **named, **others)

    return call, (*args, *(kwargs[name] for name in names)), rest


def _without_cache(block: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove generation caches from the arguments, as transformers' layers do.

    A recomputation would write to them a second time.

    Raises:
        InputError: If they hold earlier tokens, which the block would run without.
    """
    if not torch.is_grad_enabled():
        return kwargs
    keeps = getattr(block, "_can_checkpoint_with_cache", False)
    if not keeps and any(_holds_tokens(value, block) for value in kwargs.values()):
        raise InputError(
            "A block that is to be recomputed gets keys and values of earlier tokens "
            "(past_key_values), as in peft's prefix tuning. A recomputation would "
            "write to them a second time, and without them something else would train. "
            "Keep or offload such blocks: leave them out of the Recipe's segments, as "
            "budgetfit.plan does."
        )
    if not _is_transformers_layer(block):
        return {k: None if _is_cache(value) else value for k, value in kwargs.items()}
    kwargs = dict(kwargs)
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    if not keeps:
        for name in ("past_key_values", "layer_past"):
            if name in kwargs:
                kwargs[name] = None
    return kwargs


def _holds_tokens(value: Any, block: nn.Module) -> bool:
    """Whether a generation cache has tokens of this block's layer already."""
    if not _is_cache(value):
        return False
    numbers = (getattr(module, "layer_idx", None) for module in block.modules())
    number = next((each for each in numbers if isinstance(each, int)), None)
    return number is not None and int(value.get_seq_length(number)) > 0


def _is_cache(value: object) -> bool:
    library = sys.modules.get("transformers.cache_utils")
    return library is not None and isinstance(value, library.Cache)
