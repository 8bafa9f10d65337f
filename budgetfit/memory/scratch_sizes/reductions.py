"""Scratch memory of CUDA reductions: sum, mean, norm, max, variance, ...

A reduction with few outputs is split over many thread blocks. Their partial results go
through a staging buffer, with a semaphore per output tile. Both come from the caching
allocator and may be far larger than the result: 138 MB for a 6 KB bias gradient on an
H100.

Source: ``setReduceConfig`` and ``ReduceConfig`` in ``ATen/native/cuda/Reduce.cuh``, the
order of dimensions in ``aten/src/ATen/TensorIterator.cpp``; PyTorch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from budgetfit.memory.scratch_sizes.rules import (
    MAX_INDEX,
    DeviceProperties,
    ceil_div,
    last_power_of_two,
    rounded_bytes,
    rule,
)

MAX_THREADS = 512
WARP = 32
MIN_VALUES_PER_THREAD = 16  # a split leaves at least this many to each thread
MAX_VALUES_PER_THREAD = 256  # from this many on, a split is worth it
MAX_OUTPUT_VECTOR = 4
MIN_VECTORIZED_INPUTS = 128  # of one output; with fewer, loads are not vectorized


@dataclass(frozen=True, slots=True)
class ReductionDtypes:
    """The dtypes of a reduction, as far as its scratch memory depends on them.

    ``input_vector``: consecutive inputs per load (``input_vec_size``).
    ``private_accumulator``: partial results do not fit the output's dtype, so a tensor
    above 2 GiB, which is reduced in pieces, needs a separate accumulator.
    """

    element_bytes: int
    accumulate_bytes: int
    input_vector: int
    private_accumulator: bool


@dataclass(frozen=True, slots=True)
class LoopNest:
    """A reduction as a loop nest: reduced dimensions first, the fastest one first.

    ``strides`` are the input's and ``output_strides`` the output's (0 where reduced),
    both in elements; ``offset`` is the input's first element in its storage.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    output_strides: tuple[int, ...]
    offset: int

    @property
    def reduced(self) -> int:
        """Number of reduced dimensions; they come first."""
        return self.output_strides.count(0)

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return prod(self.sizes[self.reduced :])

    @property
    def inputs(self) -> int:
        """Number of inputs per output."""
        return prod(self.sizes) // self.outputs


@rule(parts=3)
def reduction(device: DeviceProperties, *arguments: int) -> list[int]:
    """Return [accumulator, staging buffer, semaphores] of one reduction, in bytes.

    Arguments: element bytes, accumulator bytes, input vector, private accumulator (0
    or 1), reduced dimensions as bits (bit k: dimension k), storage offset, then the
    input's sizes, then its strides in elements.
    """
    element, accumulate, vector, private, mask, offset, *layout = arguments
    ndim = len(layout) // 2
    sizes, strides = tuple(layout[:ndim]), tuple(layout[ndim:])
    if prod(sizes) == 0:
        return [0, 0, 0]
    numbers = ReductionDtypes(element, accumulate, vector, bool(private))
    return _of_loop(device, numbers, loop_nest(sizes, strides, mask, offset))


def reduce_rows(
    device: DeviceProperties, rows: int, columns: int, numbers: ReductionDtypes
) -> list[int]:
    """Return the scratch of summing a contiguous matrix over its rows."""
    nest = loop_nest((rows, columns), (columns, 1), 1, 0)
    return _of_loop(device, numbers, nest)


@lru_cache(maxsize=4096)
def _of_loop(
    device: DeviceProperties, numbers: ReductionDtypes, nest: LoopNest
) -> list[int]:
    pieces = _pieces(nest, numbers.element_bytes)
    accumulator = 0
    if len(pieces) > 1 and numbers.private_accumulator:
        extent = max(
            n * s for n, s in zip(nest.sizes, nest.output_strides, strict=True)
        )
        accumulator = max(extent, 1) * numbers.accumulate_bytes
    # The pieces run one after the other: only the largest buffers count.
    buffers = max(
        (_buffers(device, numbers, piece) for piece in pieces),
        key=lambda pair: rounded_bytes(*pair),
    )
    return [accumulator, *buffers]


def loop_nest(
    sizes: tuple[int, ...], strides: tuple[int, ...], mask: int, offset: int
) -> LoopNest:
    """Return the kernel's loop order, dimensions coalesced (``TensorIterator``)."""
    output_strides = _output_strides(sizes, mask)
    order = _order(sizes, strides, output_strides)
    merged: list[list[int]] = []
    for dim in order:
        row = [sizes[dim], strides[dim], output_strides[dim]]
        if merged and _merges(merged[-1], row):
            last = merged[-1]
            if last[0] == 1:
                last[1:] = row[1:]
            last[0] *= row[0]
        else:
            merged.append(row)
    return LoopNest(
        tuple(row[0] for row in merged),
        tuple(row[1] for row in merged),
        tuple(row[2] for row in merged),
        offset,
    )


def _output_strides(sizes: tuple[int, ...], mask: int) -> tuple[int, ...]:
    """Return the strides of the contiguous output, 0 where a dimension is reduced."""
    strides, step = [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        if not mask >> dim & 1:
            strides[dim] = step
            step *= max(sizes[dim], 1)
    return tuple(strides)


def _merges(inner: list[int], outer: list[int]) -> bool:
    """Return whether two dimensions can be coalesced into one."""
    if inner[0] == 1 or outer[0] == 1:
        return True
    return all(inner[0] * inner[k] == outer[k] for k in (1, 2))


def _order(
    sizes: tuple[int, ...], strides: tuple[int, ...], output_strides: tuple[int, ...]
) -> list[int]:
    """Return the dimensions by ascending stride, reduced ones first."""
    order = list(reversed(range(len(sizes))))
    for start in range(1, len(order)):
        moving = start
        for other in range(start - 1, -1, -1):
            verdict = _compare(
                order[other], order[moving], sizes, strides, output_strides
            )
            if verdict > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif verdict < 0:
                break
    return order


def _compare(
    first: int,
    second: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    output_strides: tuple[int, ...],
) -> int:
    """Return 1 if ``first`` belongs after ``second``, -1 if before, 0 if open."""
    if (output_strides[first] == 0) != (output_strides[second] == 0):
        return 1 if output_strides[second] == 0 else -1
    for operand in (output_strides, strides):
        one, two = operand[first], operand[second]
        if one == 0 or two == 0:
            continue
        if one != two:
            return 1 if one > two else -1
        if sizes[first] > sizes[second]:
            return 1
    return 0


def _pieces(nest: LoopNest, element_bytes: int) -> list[LoopNest]:
    """Split the loop until each piece has 32-bit indices (``with_32bit_indexing``)."""
    extents = [
        (size - 1) * max(abs(stride), abs(output))
        for size, stride, output in zip(
            nest.sizes, nest.strides, nest.output_strides, strict=True
        )
    ]
    reach = max(
        sum((n - 1) * s for n, s in zip(nest.sizes, operand, strict=True))
        for operand in (nest.strides, nest.output_strides)
    )
    if prod(nest.sizes) <= MAX_INDEX and 1 + reach * element_bytes <= MAX_INDEX:
        return [nest]
    # The dimension with the widest extent is halved; of equal ones the outermost.
    dim = max(reversed(range(len(extents))), key=extents.__getitem__)
    half = nest.sizes[dim] // 2
    result = []
    for start, size in ((0, half), (half, nest.sizes[dim] - half)):
        sizes = (*nest.sizes[:dim], size, *nest.sizes[dim + 1 :])
        offset = nest.offset + start * nest.strides[dim]
        piece = LoopNest(sizes, nest.strides, nest.output_strides, offset)
        result += _pieces(piece, element_bytes)
    return result


def _output_vector(nest: LoopNest) -> int:
    """Return how many consecutive outputs a thread computes (``output_vec_size``)."""
    vector = MAX_OUTPUT_VECTOR
    others = [s for k, s in enumerate(nest.strides) if k != nest.reduced]
    for number in (nest.offset, nest.sizes[nest.reduced], *others):
        while number % vector:
            vector //= 2
    return vector


@dataclass(frozen=True, slots=True)
class _ThreadBlock:
    """Thread block of a reduction, ``width`` threads along the fastest dimension.

    ``along_reduced``: that dimension is reduced, so that the threads share an output.
    ``vector``: consecutive outputs per thread.
    """

    width: int
    height: int
    along_reduced: bool
    vector: int

    @classmethod
    def of(cls, numbers: ReductionDtypes, nest: LoopNest) -> _ThreadBlock:
        """Return the block for a loop: powers of two, a warp wide if possible."""
        reduced, inputs, outputs = nest.reduced, nest.inputs, nest.outputs
        along_reduced = (
            reduced == len(nest.sizes) or nest.strides[0] < nest.strides[reduced]
        )
        fastest = nest.strides[0] if along_reduced else nest.strides[reduced]
        dim0, dim1 = (inputs, outputs) if along_reduced else (outputs, inputs)
        vector = 1
        if fastest == 1:
            if not along_reduced:
                vector = _output_vector(nest)
                dim0 //= vector
            elif dim0 >= MIN_VECTORIZED_INPUTS and reduced == 1:
                dim0 //= numbers.input_vector
        most = MAX_THREADS // vector
        dim0 = min(last_power_of_two(dim0), most)
        dim1 = min(last_power_of_two(dim1), most)
        height = min(dim1, most // min(dim0, WARP))
        return cls(min(dim0, most // height), height, along_reduced, vector)


def _buffers(
    device: DeviceProperties, numbers: ReductionDtypes, nest: LoopNest
) -> tuple[int, int]:
    """Return the bytes of staging buffer and semaphores (0: not split)."""
    if not nest.sizes:
        return 0, 0
    threads = _ThreadBlock.of(numbers, nest)
    along_reduced, width = threads.along_reduced, threads.width
    step_input, step_output = (width, 1) if along_reduced else (1, width)

    per_thread = ceil_div(nest.inputs, step_input)
    least = min(threads.height * MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD)
    if per_thread < least:
        return 0, 0  # the threads of a block work on different outputs: not split
    per_thread = ceil_div(nest.inputs, step_input * threads.height)

    # Spread an output over several thread blocks while the GPU has idle SMs.
    target = device.sm_count * (device.threads_per_sm // (width * threads.height))
    grid = ceil_div(nest.outputs // threads.vector, step_output)
    if per_thread < MAX_VALUES_PER_THREAD or grid > target:
        return 0, 0
    blocks = max(
        min(ceil_div(target, grid), ceil_div(per_thread, MIN_VALUES_PER_THREAD)),
        ceil_div(per_thread, MAX_VALUES_PER_THREAD),
    )
    if blocks <= 1:
        return 0, 0
    partial = numbers.accumulate_bytes * nest.outputs * blocks
    return partial * (1 if along_reduced else width * threads.vector), 4 * grid
