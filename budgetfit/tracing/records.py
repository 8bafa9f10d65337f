"""Records of the storage log, steps of an op's memory, and a device's op semantics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch._ops import OpOverload

from budgetfit.core.step_trace import KernelScratch, SizeLimit
from budgetfit.tracing.call_cache import Args, CallKey, Kwargs
from budgetfit.tracing.op_costs import NO_COST, OpCost

MovedStorages = tuple[tuple[tuple[int, ...], int], ...]


class OpRecord(NamedTuple):
    """One op: position among the events, layer, cost, and its phase.

    ``touched`` is for ops outside modules: groups of storages with the bytes moved of
    each, to be attributed to the layer that owns the storages. ``recomputed``: it runs
    again, in the backward.
    """

    name: str
    event: int
    layer: int
    cost: OpCost
    in_optimizer: bool = False
    touched: MovedStorages = ()
    recomputed: bool = False

    def moved_to(self, event: int, copies: Mapping[int, int]) -> OpRecord:
        """Return the same op at another event, on copies of its storages."""
        touched = self.touched and tuple(
            (tuple(copies.get(n, n) for n in storages), moved_bytes)
            for storages, moved_bytes in self.touched
        )
        # ``_replace`` takes three times as long, and a trace has many ops.
        rest = self.layer, self.cost, self.in_optimizer, touched, self.recomputed
        return OpRecord(self.name, event, *rest)


class Free(NamedTuple):
    """Step of an op: free a buffer, the last one that this very object allocated."""

    scratch: KernelScratch[int]


class Output(NamedTuple):
    """Step of an op: allocate the output at ``position``; None: all that are left.

    ``size_bytes``: of its storage, where that is not the output's own size.
    """

    position: int | None = None
    size_bytes: int | None = None


class Workspace(NamedTuple):
    """Step of an op: allocate a buffer that is never freed."""

    scratch: KernelScratch[int]


OpStep = KernelScratch[int] | Free | Output | Workspace


class OpMemory(NamedTuple):
    """What an op allocates and frees, in order; a ``KernelScratch`` is an allocation.

    Outputs that no step allocates come last; then the buffers that no step freed are
    freed. ``unverified``: the op's name, if its kernels have not been checked against
    recordings. ``cost``: what the op asks of the device besides. ``limits``: sizes that
    its kernels refuse to exceed.
    """

    steps: tuple[OpStep, ...] = ()
    unverified: str = ""
    cost: OpCost = NO_COST
    limits: tuple[SizeLimit[int], ...] = ()


@functools.cache
def op_name(func: OpOverload) -> str:
    """Return an op's name, as ``aten.mm.default``."""
    return str(func)


RunOp = Callable[[OpOverload, Args, Kwargs], Any]


def call_op(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Call the op."""
    return func(*args, **kwargs)


class OpSemantics(Protocol):
    """How ops behave on the device that is traced for."""

    def run(self, run: RunOp, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the op, or what the device runs instead."""

    def memory(
        self,
        func: OpOverload,
        args: Args,
        kwargs: Kwargs,
        out: object,
        call: CallKey | None = None,
    ) -> OpMemory:
        """Return what the op's kernels allocate; ``call``: the memo's key."""
