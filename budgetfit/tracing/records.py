"""Record types of the storage log, and the protocol of a device's op semantics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.tracing.call_cache import CallKey

MovedStorages = tuple[tuple[tuple[int, ...], int], ...]


class ScratchBuffer(NamedTuple):
    """A scratch buffer sized by a kernel rule: rule, arguments, buffer number."""

    rule: str
    arguments: tuple[int, ...]
    part: int


class OpRecord(NamedTuple):
    """One op for the roofline: position among the events, rate, FLOPs, bytes moved.

    ``touched`` is for ops outside modules: groups of storages with the bytes moved of
    each, to be attributed to the layer that owns the storages.
    """

    name: str
    event: int
    layer: int
    rate: int
    flops: float
    moved_bytes: int
    touched: MovedStorages = ()


class LogStep(NamedTuple):
    """One step inside an op: allocate or free scratch buffers, allocate an output.

    ``number`` identifies an allocation, or the output by its position.
    """

    kind: Literal["alloc", "persist", "free", "output"]
    number: int
    rows: tuple[ScratchBuffer, ...] = ()


class OpScratch(NamedTuple):
    """The memory that one op allocates besides its outputs.

    ``persistent`` is never freed (workspaces); ``before`` and ``after`` are allocated
    before and after the outputs and freed at the end of the op. ``steps`` come after
    ``before`` and order allocations, frees and outputs explicitly; what they do not
    free is freed with the op. ``unverified``: the op's name, if its kernels have not
    been checked against recordings.
    """

    persistent: Sequence[ScratchBuffer] = ()
    before: Sequence[ScratchBuffer] = ()
    after: Sequence[ScratchBuffer] = ()
    output_bytes: int | None = None
    host_outputs: Sequence[int] = ()
    steps: Sequence[LogStep] = ()
    unverified: str = ""


NO_SCRATCH = OpScratch()


@functools.cache
def op_name(func: torch._ops.OpOverload) -> str:
    """Return an op's name, as ``aten.mm.default``."""
    return str(func)


RunOp = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def call_op(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the op."""
    return func(*args, **kwargs)


class OpSemantics(Protocol):
    """How ops behave on the device that is traced for."""

    def run(
        self,
        run: RunOp,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the op, or what the device runs instead."""

    def scratch(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        call: CallKey | None = None,
    ) -> OpScratch:
        """Return the scratch memory of the op's kernels; ``call``: the memo's key."""
