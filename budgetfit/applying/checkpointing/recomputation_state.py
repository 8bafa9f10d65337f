"""Make a block's forward repeatable: restore its state for recomputation.

``torch.utils.checkpoint`` restores torch's RNG states and autocast. This adds Python's
and numpy's RNG states, buffers, attributes and globals that the forward mutates, and
what others may have set since: plain values in arguments and attributes, and training
modes. It checks for what cannot be restored: arguments and parameters that were written
to, other parameters, and, by values, a hidden generator or a counter in another object.
"""

import functools
import operator
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from budgetfit.applying.checkpointing.argument_values import ArgumentValues
from budgetfit.applying.checkpointing.forward_inputs import (
    ForwardInputs,
    without_new_hooks,
)
from budgetfit.applying.checkpointing.mutated_attributes import (
    Change,
    MutatedAttributes,
    Settings,
    restored_attributes,
)
from budgetfit.applying.checkpointing.mutated_buffers import (
    BufferSnapshot,
    MutatedBuffers,
    restored_buffers,
)
from budgetfit.applying.checkpointing.recomputation_check import SavedTensorCheck
from budgetfit.applying.checkpointing.selective import not_counted
from budgetfit.applying.training_modes import module_modes, restored_modes
from budgetfit.utils.rng_state import HostRngState
from budgetfit.utils.user_code import is_library, users_hooks


def compares_values(forward: int) -> bool:
    """Whether the ``forward``-th forward of a block is compared, counted from 1."""
    # After each power of two, about its square root of forwards in a row: 1 to 5, 8 to
    # 10, 16 to 19, 32 to 37 ... So the first step finds what always differs, and what
    # every third or eleventh micro-batch does is met too (with any period up to 16 by
    # the 271st forward). Of ``n`` forwards at most about ``3.4 * n**0.5`` are compared.
    power = 1 << (forward.bit_length() - 1)
    return (forward - power) ** 2 < power


class RepeatableForwards:
    """Makes the forwards of a block repeatable.

    Values are compared in some of the forwards: ``compares_values``.

    ``check``: whether values are compared. ``run_to_end``: whether an op writes to
    tensors that autograd has saved already. ``in_segment``: whether the recomputation's
    output goes to the next block.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        *,
        check: bool,
        run_to_end: bool = False,
        in_segment: bool = False,
    ) -> None:
        self.block = block
        self.name, self._check, self._run_to_end = name, check, run_to_end
        self.in_segment = in_segment
        self.attributes = MutatedAttributes(block)
        self.buffers = self._all_buffers()
        self._parts = _parts(block)
        self._forwards = 0

    def __getstate__(self) -> dict[str, Any]:
        """Let copies of a model find anew what their forwards may change."""
        return {**vars(self), "_parts": [], "buffers": MutatedBuffers(())}

    def _all_buffers(self) -> MutatedBuffers:
        return MutatedBuffers(
            (*self.block.modules(), *self.attributes.outside),
            copies_statistics=self.attributes.names_statistics,
        )

    def forward(self, function: Callable[..., object]) -> Callable[..., Any]:
        """Wrap ``function`` for one forward and its recomputations."""
        if not torch.is_grad_enabled():
            return function
        parts = _parts(self.block)
        if not _same(parts, self._parts):
            self._parts = parts
            self.attributes.find_modules()
            self.buffers = self._all_buffers()
        self._forwards += 1
        values = (
            SavedTensorCheck(self.name, after_forward=self._run_to_end)
            if self._check and compares_values(self._forwards)
            else None
        )
        return _RepeatableForward(self, function, values)


def _parts(block: nn.Module) -> list[object]:
    """Return what tells that a block was changed: modules, hooks, tensors' counts."""
    modules = [*block.modules()]
    found: list[object] = [*modules, *users_hooks(modules)]
    for module in modules:
        found.append(len(module._buffers))
        kind: Any = type(module)
        if _is_users(kind):
            attributes = vars(module).values()
            found.append(sum(isinstance(each, torch.Tensor) for each in attributes))
    return found


@functools.cache  # asked in every forward
def _is_users(kind: object) -> bool:
    return not is_library(kind.__module__)


def _same(parts: list[object], others: list[object]) -> bool:
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


class _RepeatableForward:
    """One forward: the first call runs it, later calls recompute it."""

    def __init__(
        self,
        owner: RepeatableForwards,
        function: Callable[..., object],
        values: SavedTensorCheck | None,
    ) -> None:
        self._owner, self._function, self._values = owner, function, values
        self._inputs: ForwardInputs | None = None
        self._arguments: ArgumentValues | None = None
        self._generators: HostRngState | None = None
        self._buffers: list[BufferSnapshot] = []
        self._others: list[BufferSnapshot] = []
        self._attributes: list[Change] = []
        self._settings: Settings | None = None
        self._modes: list[tuple[nn.Module, bool]] = []

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run or recompute the block."""
        if self._generators is not None and self._inputs is not None:
            self._inputs.check(self._owner.block, self._owner.name, (args, kwargs))
            return self._recompute(self._generators, args, kwargs)
        self._inputs = ForwardInputs(self._owner.block, (args, kwargs))
        generators = HostRngState.now()
        self._modes = module_modes(self._owner.block)
        compared = self._values is not None
        with not_counted():
            buffers = self._owner.buffers.snapshot(every=compared)
            attributes = self._owner.attributes.snapshot(every=compared)
        self._settings = self._owner.attributes.settings(attributes)
        self._arguments = ArgumentValues(args, kwargs, attributes.contents)
        if self._values is not None:
            self._values.refuse_iterator(attributes.iterator())
        with self._values.recorded() if self._values is not None else nullcontext():
            output = self._function(*args, **kwargs)
        self._inputs.after_forward()
        if self._values is not None and self._owner.in_segment:
            self._values.record_output(output)
        with not_counted():
            self._buffers = self._owner.buffers.find_mutated(buffers, compared=compared)
            self._others = self._owner.buffers.others(
                buffers, self._buffers, compared=compared
            )
            self._attributes = self._owner.attributes.changes(attributes)
        if self._values is not None:
            self._values.suspects = tuple(
                dict.fromkeys(e.name for e in self._attributes if not e.is_kept)
            )
        self._generators = generators
        return output

    def _recompute(
        self, generators: HostRngState, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> object:
        with ExitStack() as stack:
            stack.callback(HostRngState.now().restore)
            generators.restore()
            stack.enter_context(without_new_hooks(self._owner.block, (args, kwargs)))
            stack.enter_context(restored_modes(self._modes))
            with not_counted():
                if self._settings is not None:
                    changes = self._settings.changes()
                    stack.enter_context(restored_attributes(changes))
                stack.enter_context(self._owner.buffers.restored_others(self._others))
                stack.enter_context(restored_buffers(self._buffers))
                stack.enter_context(restored_attributes(self._attributes))
                if self._arguments is not None:
                    stack.enter_context(self._arguments.restored())
            if self._values is not None:
                stack.enter_context(self._values.compared())
            output = self._function(*args, **kwargs)
            if self._values is not None and self._owner.in_segment:
                self._values.compare_output(output)
            return output
