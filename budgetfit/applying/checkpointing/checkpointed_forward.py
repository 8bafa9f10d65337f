"""One block of a segment: how its forward is called in place of a plain call."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint, noop_context_fn

from budgetfit.applying.checkpointing.activation_offload import (
    inputs_on_host,
    run_offloaded,
)
from budgetfit.applying.checkpointing.repeatable_forward import Repeatable
from budgetfit.applying.checkpointing.selective import SavedCalls
from budgetfit.applying.pytree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.applying.checkpointing.segment_checkpoint import SegmentRegion

# A model may be compiled around its blocks. Into them torch.compile would trace its own
# checkpoints, which fail or save other tensors than planned. As torch.compiler.disable,
# but dynamo is imported (seconds) at the first call and not here.
_eager = _disable_dynamo


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """How one block is to be called.

    Attributes:
        block: The block.
        random: Whether the generators' state is kept for the recomputation.
        check: See ``checkpoint.apply_segments``.
        saved: The calls that selective checkpointing saves.
        offload: Nothing runs again; what autograd saves waits in host memory.
        input_on_host: The checkpoint's input waits in host memory.
        repeats: Makes the block's forwards repeatable.
        to_the_end: Whether a recomputation runs to its end, and an offload begins
            there.
    """

    block: nn.Module
    random: bool
    check: str
    saved: SavedCalls | None = None
    offload: bool = False
    input_on_host: bool = False
    repeats: Repeatable
    to_the_end: bool = False

    @_eager
    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - whatever the block returns
        """Call ``function``, the block's forward."""
        if self.offload:
            return run_offloaded(
                function,
                args,
                kwargs,
                module=self.block,
                at_the_end=self.to_the_end,
            )
        if next(tensors_in(args), None) is None:
            # Torch keeps the generators only of devices that it sees in ``args``: with
            # all tensors behind keywords, dropout would differ in the recomputation.
            function, args, kwargs = _keywords_first(function, args, kwargs)
        return self._checkpoint(function, args, kwargs)

    def inside_a_recomputation(
        self,
        function: Callable[..., Any],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call ``function`` under a checkpoint that itself lies in a checkpoint.

        What is behind a keyword would be held by reference, and with it what the outer
        checkpoint is there to drop; what is positional is saved through its hooks.
        """
        function, args, kwargs = _keywords_first(function, args, kwargs)
        return self._checkpoint(function, args, kwargs)

    def _checkpoint(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Call torch's non-reentrant checkpoint.

        It stops a recomputation at the last tensor that backward waits for, unless
        ``to_the_end``. Saved calls behind that point are not asked for again; they stay
        until the block's graph is gone, so a plan does not save them.
        """
        x = next(tensors_in(args), None)
        moving = self.input_on_host and x is not None and torch.is_grad_enabled()
        with inputs_on_host(x) if moving and x is not None else nullcontext():
            del x
            return checkpoint(
                self.repeats.forward(function),
                *args,
                use_reentrant=False,
                preserve_rng_state=self.random,
                determinism_check="none" if self.check == "none" else "default",
                early_stop=not self.to_the_end,
                context_fn=(
                    noop_context_fn if self.saved is None else self.saved.contexts
                ),
                **kwargs,
            )


class CheckpointedForward:
    """Stands in for one block's ``forward`` and calls it as planned.

    A plain object and no closure, so that a deep copy of the model is a working model
    of its own. ``__wrapped__`` is the block's forward, for ``inspect.signature``.

    Args:
        call: How the block is called.
        plain: The block's forward.
        region: Of a segment of several blocks.
        position: The block's place in it.
        repeats: Of the block inside the segment's recomputation.
        nested: Whether it is a checkpoint of its own in there.
    """

    def __init__(  # noqa: PLR0913 - a block and its place in a segment
        self,
        call: BlockCall,
        plain: Callable[..., Any],
        region: SegmentRegion | None = None,
        position: int = 0,
        *,
        repeats: Repeatable | None = None,
        nested: bool = False,
    ) -> None:
        functools.update_wrapper(self, plain)
        self.__wrapped__ = plain
        self._call = call
        self._region = region
        self._position = position
        self._repeats = repeats
        self._nested = nested

    @_eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the block."""
        if not self._call.offload:
            kwargs = _without_cache(self._call.block, kwargs)
        if self._region is None or self._repeats is None:
            return self._call(self.__wrapped__, *args, **kwargs)
        forward = self.__wrapped__
        if self._nested:
            forward = functools.partial(self._call.inside_a_recomputation, forward)
        return self._region.call(
            self._position,
            self._repeats.forward(forward),
            args,
            kwargs,
            random=self._call.random,
        )


def is_transformers_layer(block: nn.Module) -> bool:
    """Whether the block has transformers' own checkpointing, of one layer alone."""
    layers = sys.modules.get("transformers.modeling_layers")  # not there: no such block
    return layers is not None and isinstance(block, layers.GradientCheckpointingLayer)


def _keywords_first(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Turn tensors that are keyword arguments into positional ones, before others."""
    if isinstance(function, functools.partial):  # transformers binds keywords this way
        args = (*function.args, *args)
        kwargs = {**function.keywords, **kwargs}
        function = function.func
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    rest = {name: value for name, value in kwargs.items() if name not in names}
    given = len(args)

    def call(*values: Any) -> Any:  # noqa: ANN401
        named = dict(zip(names, values[given:], strict=True))
        return function(*values[:given], **named, **rest)

    return call, (*args, *(kwargs[name] for name in names)), {}


def _without_cache(block: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take a generation cache away, by the rule of transformers' own layers.

    A block that writes into one would do so a second time when it runs again.
    """
    if not torch.is_grad_enabled():
        return kwargs
    if not is_transformers_layer(block):
        return {k: None if _is_cache(value) else value for k, value in kwargs.items()}
    kwargs = dict(kwargs)
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    if not getattr(block, "_can_checkpoint_with_cache", False):
        for name in ("past_key_values", "layer_past"):
            if name in kwargs:
                kwargs[name] = None
    return kwargs


def _is_cache(value: object) -> bool:
    library = sys.modules.get("transformers.cache_utils")
    return library is not None and isinstance(value, library.Cache)
