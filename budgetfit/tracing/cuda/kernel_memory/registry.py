"""Registry of aten ops whose CUDA kernels allocate scratch memory.

As torch's FLOP counter registry: a function per op returns the scratch memory of a
call, as the name of a rule of ``memory.scratch_sizes`` and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from budgetfit.memory.scratch_sizes.workspaces import PARTS
from budgetfit.tracing.records import LogStep, ScratchBuffer

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

When = Literal["before", "after"]


class Scratch(NamedTuple):
    """Scratch memory of one kernel call: ``parts`` buffers.

    ``arguments`` are integers, each affine in the batch size. ``when``: allocated
    before or after the op's outputs.
    """

    rule: str
    arguments: tuple[int, ...]
    parts: int
    when: When

    def buffers(self) -> list[ScratchBuffer]:
        """Return a log record for each buffer."""
        return [
            ScratchBuffer(self.rule, self.arguments, part) for part in range(self.parts)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Alloc:
    """Step inside a kernel call: allocate scratch memory."""

    scratch: Scratch


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Step inside a kernel call: free what ``alloc`` allocated."""

    alloc: Alloc


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Step inside a kernel call: allocate the output at position ``index``."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Gemm:
    """Step inside a kernel call: a cuBLAS matrix product, with its workspace."""


KernelStep = Alloc | Free | Output | Gemm
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
ScratchFunction = Callable[[Args, Kwargs, Any], Iterable[Scratch]]
StepsFunction = Callable[[Args, Kwargs, Any], Iterable[KernelStep]]
OutputBytesFunction = Callable[[Args, Kwargs, Any], int]
Function = TypeVar("Function")

SCRATCH: dict[str, ScratchFunction] = {}
STEPS: dict[str, StepsFunction] = {}
OUTPUT_BYTES: dict[str, OutputBytesFunction] = {}


def scratch(rule: str, *arguments: int, when: When = "after") -> Scratch:
    """Return the scratch memory sized by a rule of ``memory.scratch_sizes``.

    Raises:
        KeyError: There is no such rule.
    """
    return Scratch(rule, tuple(int(a) for a in arguments), PARTS[rule], when)


def buffer(size_bytes: int, when: When = "after") -> Scratch:
    """Return a temporary tensor of that many bytes."""
    return scratch("buffer", size_bytes, when=when)


def copy_of(tensor: Tensor, element_bytes: int = 0, when: When = "after") -> Scratch:
    """Return a temporary copy, contiguous or of another dtype."""
    return buffer(tensor.numel() * (element_bytes or tensor.element_size()), when)


def contiguous_copies(*tensors: Tensor, when: When = "after") -> Iterator[Scratch]:
    """Return contiguous copies of the tensors that are not contiguous."""
    return (copy_of(t, when=when) for t in tensors if not t.is_contiguous())


def flattens(tensor: Tensor) -> bool:
    """Return whether ``tensor.view(-1)`` works without a copy."""
    steps = [
        (size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(steps))


def register_scratch(*ops: str) -> Callable[[ScratchFunction], ScratchFunction]:
    """Register the scratch memory of the CUDA kernels of these aten ops.

    It is taken to live until the op ends. Ops are named like ``sum.dim_IntList``, by
    name because not every torch version has every op; without an overload, for all
    overloads that are not registered themselves. The function gets the call's
    arguments, keyword arguments and outputs.

    Raises:
        ValueError: An op is registered already.
    """

    def register(function: ScratchFunction) -> ScratchFunction:
        for op in ops:
            if op in SCRATCH or op in STEPS:
                raise ValueError(f"aten.{op} has its temporaries already")
            SCRATCH[op] = function
        return function

    return register


def _registered(table: dict[str, Function], func: OpOverload) -> Function | None:
    """Return the function of an overload, else that of all overloads of its op."""
    packet, _, overload = str(func).removeprefix("aten.").partition(".")
    return table.get(f"{packet}.{overload}") or table.get(packet)


def scratch_of(
    func: OpOverload, args: Args, kwargs: Kwargs, out: object
) -> tuple[Scratch, ...]:
    """Return the scratch memory of an op's CUDA kernels; () if none is registered."""
    function = _registered(SCRATCH, func)
    return tuple(function(args, kwargs, out)) if function else ()


def register_steps(*ops: str) -> Callable[[StepsFunction], StepsFunction]:
    """Register allocations, frees and outputs inside these aten ops, in order.

    What the function does not free is freed at the end of the op, and outputs that it
    does not yield come last.

    Raises:
        ValueError: An op is registered already.
    """

    def register(function: StepsFunction) -> StepsFunction:
        for op in ops:
            if op in SCRATCH or op in STEPS:
                raise ValueError(f"aten.{op} has its temporaries already")
            STEPS[op] = function
        return function

    return register


def kernel_steps(
    func: OpOverload, args: Args, kwargs: Kwargs, out: object
) -> tuple[KernelStep, ...]:
    """Return allocations, frees and outputs inside an op; () if not registered."""
    function = _registered(STEPS, func)
    return tuple(function(args, kwargs, out)) if function else ()


def register_output_bytes(
    *ops: str,
) -> Callable[[OutputBytesFunction], OutputBytesFunction]:
    """Register the storage bytes of the only output of these aten ops."""

    def register(function: OutputBytesFunction) -> OutputBytesFunction:
        for op in ops:
            if op in OUTPUT_BYTES:
                raise ValueError(f"aten.{op} has its output's size already")
            OUTPUT_BYTES[op] = function
        return function

    return register


def output_bytes_of(
    func: OpOverload, args: Args, kwargs: Kwargs, out: object
) -> int | None:
    """Return the bytes of an output's storage if it is larger on CUDA, else None.

    The size is affine in the batch size.
    """
    function = OUTPUT_BYTES.get(str(func).removeprefix("aten.").partition(".")[0])
    return function(args, kwargs, out) if function else None


def log_steps(
    steps: Sequence[KernelStep],
    workspace: Sequence[ScratchBuffer] = (),
    persistent: Sequence[ScratchBuffer] = (),
) -> tuple[LogStep, ...]:
    """Return the steps of an op as records of the storage log.

    ``workspace`` is allocated and freed by each matrix product, ``persistent`` is
    allocated by the first one and never freed.
    """
    number: dict[KernelStep, int] = {}
    result = []
    for step in steps:
        if isinstance(step, Alloc):
            number[step] = len(number)
            buffers = tuple(step.scratch.buffers())
            result.append(LogStep("alloc", number[step], buffers))
        elif isinstance(step, Gemm):
            if persistent:
                result.append(LogStep("persist", 0, tuple(persistent)))
                persistent = ()
            if workspace:
                number[step] = len(number)
                result.append(LogStep("alloc", number[step], tuple(workspace)))
                result.append(LogStep("free", number[step]))
        elif isinstance(step, Output):
            result.append(LogStep("output", step.index))
        else:
            result.append(LogStep("free", number[step.alloc]))
    return tuple(result)
