"""The registry of ops whose CUDA kernels take memory for themselves.

Like torch's FLOP registry: a function per op turns the call into the name of a rule of
``memory.kernel_scratch`` and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from budgetfit.memory.kernel_rules.workspaces import PARTS

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

When = Literal["before", "after"]


class Scratch(NamedTuple):
    """Memory inside one kernel call: ``parts`` buffers that all die with the call.

    ``arguments`` are whole numbers, each affine in the batch size by itself. ``when``:
    allocated before or after the op's outputs.
    """

    rule: str
    arguments: tuple[int, ...]
    parts: int
    when: When


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """A step inside a kernel call: memory is taken now."""

    scratch: Scratch


@dataclass(frozen=True, slots=True, eq=False)
class Give:
    """A step inside a kernel call: what was taken is given back."""

    take: Take


@dataclass(frozen=True, slots=True, eq=False)
class Born:
    """A step inside a kernel call: the output at this position is made."""

    output: int


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A step inside a kernel call: cuBLAS multiplies, with a workspace of its own."""


InnerStep = Take | Give | Born | Product
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = Callable[[Args, Kwargs, Any], Iterable[Scratch]]

FUNCTIONS: dict[str, Call] = {}

Steps = Callable[[Args, Kwargs, Any], Iterable[InnerStep]]
STEPS: dict[str, Steps] = {}

Rule = TypeVar("Rule")
Size = Callable[[Args, Kwargs, Any], int]
KEPT: dict[str, Size] = {}


def scratch(rule: str, *arguments: int, when: When = "after") -> Scratch:
    """Return a request by a rule of ``memory.kernel_scratch``.

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
    """Return copies of those that are not contiguous."""
    return (copy_of(t, when=when) for t in tensors if not t.is_contiguous())


def flattens(tensor: Tensor) -> bool:
    """Say whether ``tensor.view(-1)`` needs no copy."""
    steps = [
        (size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(steps))


def temporary(*ops: str) -> Callable[[Call], Call]:
    """Register what the CUDA kernels of these aten ops take.

    Each is named like ``sum.dim_IntList``; without an overload it stands for all that
    are not named themselves. Names, because not every torch version has every op. The
    function gets the call's arguments, keyword arguments and outputs.

    Raises:
        ValueError: An op is registered already.
    """

    def register(function: Call) -> Call:
        for op in ops:
            if op in FUNCTIONS or op in STEPS:
                raise ValueError(f"aten.{op} has its temporaries already")
            FUNCTIONS[op] = function
        return function

    return register


def _registered(table: dict[str, Rule], func: OpOverload) -> Rule | None:
    """Return the rule of an overload, else that of all its op's overloads."""
    packet, _, overload = str(func).removeprefix("aten.").partition(".")
    return table.get(f"{packet}.{overload}") or table.get(packet)


def temporaries_of(
    func: OpOverload, args: Args, kwargs: Kwargs, out: object
) -> tuple[Scratch, ...]:
    """Return what the op's CUDA kernel takes; () for an op without a rule."""
    function = _registered(FUNCTIONS, func)
    return tuple(function(args, kwargs, out)) if function else ()


def in_steps(*ops: str) -> Callable[[Steps], Steps]:
    """Register what happens inside these aten ops where the order matters.

    The function yields what is taken, given back and made, in order. What is not given
    back dies with the op, and outputs that are not named come last.

    Raises:
        ValueError: An op is registered already.
    """

    def register(function: Steps) -> Steps:
        for op in ops:
            if op in FUNCTIONS or op in STEPS:
                raise ValueError(f"aten.{op} has its temporaries already")
            STEPS[op] = function
        return function

    return register


def steps_of(
    func: OpOverload, args: Args, kwargs: Kwargs, out: object
) -> tuple[InnerStep, ...]:
    """Return what happens inside the op, in order; () for an op without such a rule."""
    function = _registered(STEPS, func)
    return tuple(function(args, kwargs, out)) if function else ()


def kept_output(*ops: str) -> Callable[[Size], Size]:
    """Register the bytes of the storage behind the only output of these aten ops."""

    def register(function: Size) -> Size:
        for op in ops:
            if op in KEPT:
                raise ValueError(f"aten.{op} has its output's size already")
            KEPT[op] = function
        return function

    return register


def output_bytes_of(
    func: OpOverload, args: Args, kwargs: Kwargs, out: object
) -> int | None:
    """Return the bytes behind the op's output where CUDA's storage is a larger one.

    None: as large as the trace's. The size is affine in the batch size.
    """
    function = KEPT.get(str(func).removeprefix("aten.").partition(".")[0])
    return function(args, kwargs, out) if function else None
