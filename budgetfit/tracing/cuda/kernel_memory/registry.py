"""Registry of aten ops whose CUDA kernels allocate memory besides their outputs.

As torch's FLOP counter registry: a function per op. It yields what the kernel's host
code allocates and frees, in order.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from budgetfit.core.step_trace import (
    SHARD_TO_DEVICE,
    SHARD_TO_HOST,
    TO_DEVICE,
    TO_HOST,
    KernelScratch,
)
from budgetfit.memory.scratch_sizes.rules import PARTS
from budgetfit.tracing.call_cache import Args, Kwargs
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.records import Free, Output

INDEX_BYTES = 8
SINGLE_BYTES = 4
HALVES = (torch.float16, torch.bfloat16)
OUTPUTS = Output()


class Gemm(NamedTuple):
    """Step inside a kernel call: a cuBLAS matrix product, with its workspace.

    ``copies`` of its operands live until the op ends. ``lt``: cuBLASLt runs it, where
    that has a workspace of its own.
    """

    copies: tuple[KernelScratch[int], ...] = ()
    lt: bool = False


class Unverified(NamedTuple):
    """Says that the steps of this call are not verified; ``note``: for the report."""

    note: str = ""


class Call(NamedTuple):
    """A call of an aten op on fake tensors, and the GPU that it is traced for."""

    func: OpOverload
    args: Args
    kwargs: Kwargs
    out: Any
    target: CudaTarget

    def get(self, position: int, default: object = None) -> Any:
        """Return a positional argument, or its default where the call leaves it out."""
        return self.args[position] if len(self.args) > position else default


KernelStep = KernelScratch[int] | Free | Output | Gemm | Unverified
Steps = Iterator[KernelStep]
KernelFunction = Callable[[Call], Steps]
KERNELS: dict[str, KernelFunction] = {}


def kernel_memory(*ops: str) -> Callable[[KernelFunction], KernelFunction]:
    """Register what the CUDA kernels of these aten ops allocate.

    Ops are named like ``sum.dim_IntList``, by name because not every torch version has
    every op; without an overload, for all overloads that are not registered themselves.
    The function yields, in order, buffers (``buffer``, ``scratch``), ``Free`` of a
    buffer, ``Output`` and ``Gemm``. If it yields no output, they come first; else the
    others come last. What it does not free is freed at the end of the op. It yields
    ``Unverified`` for calls that were not compared with PyTorch's host code.

    Raises:
        ValueError: An op is registered already.
    """

    def register(function: KernelFunction) -> KernelFunction:
        for op in ops:
            if op in KERNELS:
                raise ValueError(f"aten.{op} is registered already")
            KERNELS[op] = function
        return function

    return register


def kernel_steps(call: Call) -> tuple[KernelStep, ...]:
    """Return what a call allocates and frees, in order; () if not registered."""
    packet, _, overload = str(call.func).removeprefix("aten.").partition(".")
    function = KERNELS.get(f"{packet}.{overload}") or KERNELS.get(packet)
    steps = tuple(function(call)) if function else ()
    if not steps or any(isinstance(step, Output) for step in steps):
        return steps
    return (OUTPUTS, *steps)


def scratch(rule: str, *arguments: int) -> tuple[KernelScratch[int], ...]:
    """Return the buffers sized by a rule of ``memory.scratch_sizes``.

    ``arguments`` are integers, each affine in the batch size.

    Raises:
        KeyError: There is no such rule.
    """
    numbers = tuple(int(a) for a in arguments)
    return tuple(KernelScratch(rule, numbers, part) for part in range(PARTS[rule]))


def buffer(size_bytes: int) -> KernelScratch[int]:
    """Return a temporary tensor of that many bytes."""
    return KernelScratch("buffer", (int(size_bytes),), 0)


def copy_of(tensor: Tensor, element_bytes: int = 0) -> KernelScratch[int]:
    """Return a temporary copy, contiguous or of another dtype."""
    return buffer(tensor.numel() * (element_bytes or tensor.element_size()))


def contiguous_copies(*tensors: Tensor | None) -> list[KernelScratch[int]]:
    """Return contiguous copies of the tensors that are not contiguous."""
    return [copy_of(t) for t in tensors if t is not None and not t.is_contiguous()]


def freed_at_once(*buffers: KernelScratch[int]) -> Iterator[KernelScratch[int] | Free]:
    """Allocate buffers and free them, as around a call of a library."""
    yield from buffers
    yield from map(Free, reversed(buffers))


def resized(like: Tensor, out: Tensor) -> Iterator[KernelStep]:
    """Allocate an output in the size of ``like``, and again if it must be larger."""
    # A smaller output keeps a storage as large as ``like``.
    if out.numel() <= like.numel():
        yield Output(0, size_bytes=like.numel() * out.element_size())
        return
    too_small = copy_of(like, out.element_size())
    yield too_small
    yield OUTPUTS
    yield Free(too_small)


def flattens(tensor: Tensor) -> bool:
    """Return whether ``tensor.view(-1)`` works without a copy."""
    steps = [
        (size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(steps))


@cache
def verified_ops() -> frozenset[str]:
    """Return the ops whose memory was compared with that of PyTorch's CUDA host code.

    They are named like ``mm.default``; the file says how they were verified. Calls
    that are not covered yield ``Unverified``.
    """
    text = files(__package__).joinpath("verified_ops.txt").read_text("utf-8")
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return frozenset(line[0] for line in lines if line)


def is_verified(func: OpOverload) -> bool:
    """Return whether an op's memory is verified."""
    # Outside aten only our host copies, which allocate their output alone, and FSDP2's,
    # by recordings of whole steps (``tests/accuracy/sharded``).
    name = str(func)
    if func.namespace == "aten":
        return name.partition(".")[2] in verified_ops()
    copies = TO_HOST, TO_DEVICE, SHARD_TO_HOST, SHARD_TO_DEVICE
    return name in copies or func.namespace == "fsdp"
