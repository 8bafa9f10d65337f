"""A block's forward that can run again in backward and is then the same forward.

Torch's checkpoints repeat torch's own generators and autocast. Here is the rest: what
Python and numpy draw, buffers, attributes and globals that the forward moves on, the
modes that an evaluation before backward changes, and a check of the values, for what
nobody can keep: a hidden generator, a counter in another object.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from budgetfit.applying.checkpointing.mutated_attributes import (
    WrittenAttributes,
    attributes_as_before,
)
from budgetfit.applying.checkpointing.mutated_buffers import (
    WrittenBuffers,
    buffers_as_before,
)
from budgetfit.applying.checkpointing.recomputation_check import SavedValues
from budgetfit.applying.training_modes import modes_as_before, modes_of
from budgetfit.utils.random_generators import HostGenerators

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from budgetfit.applying.checkpointing.mutated_attributes import Change
    from budgetfit.applying.checkpointing.mutated_buffers import HeldBuffer


class Repeatable:
    """Makes a block's forwards repeatable, one by one.

    Values are compared in the 1st, 2nd, 4th, 8th ... forward: the first step finds
    what always differs, and what begins to later is found at no cost to speak of.

    Args:
        block: The block.
        name: Its name, for the error.
        check: Whether values are compared.
        to_the_end: Whether an op fills what autograd has saved already.
        in_segment: Whether the next block takes what the recomputation returns.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        *,
        check: bool,
        to_the_end: bool = False,
        in_segment: bool = False,
    ) -> None:
        self.block = block
        self._name, self._check, self._to_the_end = name, check, to_the_end
        self.in_segment = in_segment
        self.buffers = WrittenBuffers(block)
        self.attributes = WrittenAttributes(block)
        self._forwards = 0

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` for one forward and its recomputations."""
        if not torch.is_grad_enabled():
            return function
        self._forwards += 1
        is_power_of_two = self._forwards & (self._forwards - 1) == 0
        values = (
            SavedValues(self._name, at_the_end=self._to_the_end)
            if self._check and is_power_of_two
            else None
        )
        return _OneForward(self, function, values)


class _OneForward:
    """The first call is the forward, others recompute it."""

    def __init__(
        self,
        owner: Repeatable,
        function: Callable[..., Any],
        values: SavedValues | None,
    ) -> None:
        self._owner, self._function, self._values = owner, function, values
        self._generators: HostGenerators | None = None
        self._buffers: list[HeldBuffer] = []
        self._attributes: list[Change] = []
        self._modes: list[tuple[nn.Module, bool]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the block."""
        if self._generators is not None:
            return self._again(self._generators, args, kwargs)
        generators = HostGenerators.now()
        self._modes = modes_of(self._owner.block)
        buffers = self._owner.buffers.hold(every=self._values is not None)
        attributes = self._owner.attributes.hold()
        with self._values.noted() if self._values is not None else nullcontext():
            output = self._function(*args, **kwargs)
        if self._values is not None and self._owner.in_segment:
            self._values.note_output(output)
        self._buffers = self._owner.buffers.learn(buffers)
        self._attributes = self._owner.attributes.changes(attributes)
        self._generators = generators
        return output

    def _again(
        self,
        generators: HostGenerators,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        with ExitStack() as stack:
            stack.callback(HostGenerators.now().restore)
            generators.restore()
            stack.enter_context(modes_as_before(self._modes))
            stack.enter_context(buffers_as_before(self._buffers))
            stack.enter_context(attributes_as_before(self._attributes))
            if self._values is not None:
                stack.enter_context(self._values.compared())
            output = self._function(*args, **kwargs)
            if self._values is not None and self._owner.in_segment:
                self._values.compare_output(output)
            return output
