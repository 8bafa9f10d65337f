"""What a storage log writes down: rows, and how a device's ops are described to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.tracing.op_signature import Key

Touched = tuple[tuple[tuple[int, ...], int], ...]


class ScratchRow(NamedTuple):
    """A storage that a kernel rule sizes: rule, its arguments, which of its buffers."""

    rule: str
    arguments: tuple[int, ...]
    part: int


class OpRow(NamedTuple):
    """One op's arithmetic: where in the events, its rate, FLOPs and bytes moved.

    ``touched`` says what was moved where no module runs: storages, and bytes that are
    of the layer that these belong to.
    """

    name: str
    event: int
    layer: int
    rate: int
    flops: float
    moved_bytes: int
    touched: Touched = ()


class Step(NamedTuple):
    """One step inside an op: storages are taken or given back, an output is born.

    ``number`` tells what is taken apart, and names an output by its position.
    """

    kind: Literal["take", "keep", "give", "output"]
    number: int
    rows: tuple[ScratchRow, ...] = ()


class OpScratch(NamedTuple):
    """What one op takes besides its outputs.

    ``lasting`` is taken before the op and never given back (workspaces); ``before`` and
    ``after`` are taken before and after the outputs and given back at the end of the
    op. ``steps`` say the same, and the births of outputs, in an order of their own,
    after ``before``; what they do not give back dies with the op. ``unverified``: the
    op's name, where nobody has checked that this is all.
    """

    lasting: Sequence[ScratchRow] = ()
    before: Sequence[ScratchRow] = ()
    after: Sequence[ScratchRow] = ()
    output_bytes: int | None = None
    host_outputs: Sequence[int] = ()
    steps: Sequence[Step] = ()
    unverified: str = ""


NO_SCRATCH = OpScratch()


@functools.cache
def op_name(func: torch._ops.OpOverload) -> str:
    """Return an op's name, as ``aten.mm.default``."""
    return str(func)


RunOp = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def run_plainly(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:  # noqa: ANN401
    """Call the op."""
    return func(*args, **kwargs)


class OpSemantics(Protocol):
    """How ops behave on the device that the log stands for."""

    def run(
        self,
        run: RunOp,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run the op, or what the device would do in its place."""

    def scratch(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401
        call: Key | None = None,
    ) -> OpScratch:
        """Return the memory inside the op's kernels; ``call``: what it depends on."""
