"""How much scratch memory a CUDA reduction takes: sum, mean, norm, max, variance, ...

A reduction with few outputs is split over many thread blocks. Their partial results go
through a buffer, and a counter per output tile tells which block comes last. Both come
from the caching allocator and may be far larger than the result: 138 MB for a 6 KB bias
gradient on an H100 (rules M31-M33 of cuda-memory.md).

Source: ``setReduceConfig`` and ``ReduceConfig`` in ``ATen/native/cuda/Reduce.cuh``, the
order of dimensions in ``aten/src/ATen/TensorIterator.cpp``; PyTorch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from budgetfit.memory.kernel_rules.registry import (
    KernelCard,
    block_bytes,
    ceil_div,
    rule,
)

MAX_THREADS = 512
WARP = 32
MIN_VALUES_PER_THREAD = 16  # a split leaves at least this many to each thread
MAX_VALUES_PER_THREAD = 256  # from this many on, a split is worth it
MAX_OUTPUT_VECTOR = 4
LEAST_VECTORIZED = 128  # inputs of one output, below which loads are not vectorized
LARGEST_INDEX = 2**31 - 1  # of a kernel with 32-bit indices, in bytes as in elements


@dataclass(frozen=True, slots=True)
class Numbers:
    """The dtypes of a reduction, as far as its scratch memory depends on them.

    ``input_vector`` is how many neighbouring inputs one load takes.
    ``private_accumulator``: partial results do not fit the output's dtype, so a tensor
    above 2 GiB, which is reduced piece by piece, needs an accumulator of its own.
    """

    element_bytes: int
    accumulate_bytes: int
    input_vector: int
    private_accumulator: bool


@dataclass(frozen=True, slots=True)
class Loop:
    """The reduction as a loop nest: reduced dimensions first, the fastest first.

    ``strides`` are the input's and ``output_strides`` the output's (0 where reduced),
    both in elements; ``offset`` is the input's first element in its storage.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    output_strides: tuple[int, ...]
    offset: int

    @property
    def reduced(self) -> int:
        """How many dimensions are reduced; they come first."""
        return self.output_strides.count(0)

    @property
    def outputs(self) -> int:
        """How many numbers come out."""
        return prod(self.sizes[self.reduced :])

    @property
    def inputs(self) -> int:
        """How many numbers go into each of them."""
        return prod(self.sizes) // self.outputs


@rule("reduction", parts=3)
def reduction(card: KernelCard, arguments: tuple[int, ...]) -> list[int]:
    """Return [accumulator, partial results, counters] of one reduction, in bytes.

    Arguments: element bytes, accumulator bytes, input vector, private accumulator (0
    or 1), reduced dimensions as bits (bit k: dimension k), storage offset, then the
    input's sizes, then its strides in elements.
    """
    element, accumulate, vector, private, mask, offset, *layout = arguments
    ndim = len(layout) // 2
    sizes, strides = tuple(layout[:ndim]), tuple(layout[ndim:])
    if prod(sizes) == 0:
        return [0, 0, 0]
    numbers = Numbers(element, accumulate, vector, bool(private))
    return _of_loop(card, numbers, loop_nest(sizes, strides, mask, offset))


def reduce_rows(
    card: KernelCard, rows: int, columns: int, numbers: Numbers
) -> list[int]:
    """Return the scratch of summing a contiguous matrix over its rows."""
    nest = loop_nest((rows, columns), (columns, 1), 1, 0)
    return _of_loop(card, numbers, nest)


@lru_cache(maxsize=4096)
def _of_loop(card: KernelCard, numbers: Numbers, nest: Loop) -> list[int]:
    pieces = _pieces(nest, numbers.element_bytes)
    accumulator = 0
    if len(pieces) > 1 and numbers.private_accumulator:
        extent = max(
            n * s for n, s in zip(nest.sizes, nest.output_strides, strict=True)
        )
        accumulator = max(extent, 1) * numbers.accumulate_bytes
    # The pieces run one after the other: only the largest buffers count.
    buffers = max(
        (_buffers(card, numbers, piece) for piece in pieces),
        key=lambda pair: block_bytes(*pair),
    )
    return [accumulator, *buffers]


def loop_nest(
    sizes: tuple[int, ...], strides: tuple[int, ...], mask: int, offset: int
) -> Loop:
    """Return the order in which the kernel walks, neighbouring dimensions merged."""
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
    return Loop(
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
    """Say whether two dimensions are one: stepping past the first lands on the next."""
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


def _pieces(nest: Loop, element_bytes: int) -> list[Loop]:
    """Split the loop until each piece can be indexed with 32 bits."""
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
    if prod(nest.sizes) <= LARGEST_INDEX and 1 + reach * element_bytes <= LARGEST_INDEX:
        return [nest]
    # The widest dimension is halved; of equal ones the outermost.
    dim = max(reversed(range(len(extents))), key=extents.__getitem__)
    half = nest.sizes[dim] // 2
    result = []
    for start, size in ((0, half), (half, nest.sizes[dim] - half)):
        sizes = (*nest.sizes[:dim], size, *nest.sizes[dim + 1 :])
        offset = nest.offset + start * nest.strides[dim]
        piece = Loop(sizes, nest.strides, nest.output_strides, offset)
        result += _pieces(piece, element_bytes)
    return result


def _output_vector(nest: Loop) -> int:
    """Return how many neighbouring outputs one thread computes."""
    vector = MAX_OUTPUT_VECTOR
    others = [s for k, s in enumerate(nest.strides) if k != nest.reduced]
    for number in (nest.offset, nest.sizes[nest.reduced], *others):
        while number % vector:
            vector //= 2
    return vector


def _last_power_of_two(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class _ThreadBlock:
    """The threads that work together, ``width`` of them along the fastest dimension.

    ``along_reduced``: that dimension is a reduced one, so that they share an output.
    ``vector``: how many neighbouring outputs each of them computes.
    """

    width: int
    height: int
    along_reduced: bool
    vector: int

    @classmethod
    def of(cls, numbers: Numbers, nest: Loop) -> _ThreadBlock:
        """Return the shape for a loop: powers of two, a warp wide if possible."""
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
            elif dim0 >= LEAST_VECTORIZED and reduced == 1:
                dim0 //= numbers.input_vector
        most = MAX_THREADS // vector
        dim0 = min(_last_power_of_two(dim0), most)
        dim1 = min(_last_power_of_two(dim1), most)
        height = min(dim1, most // min(dim0, WARP))
        return cls(min(dim0, most // height), height, along_reduced, vector)


def _buffers(card: KernelCard, numbers: Numbers, nest: Loop) -> tuple[int, int]:
    """Return the bytes of the partial results and of the counters (0: no split)."""
    if not nest.sizes:
        return 0, 0
    threads = _ThreadBlock.of(numbers, nest)
    along_reduced, width = threads.along_reduced, threads.width
    step_input, step_output = (width, 1) if along_reduced else (1, width)

    per_thread = ceil_div(nest.inputs, step_input)
    least = min(threads.height * MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD)
    if per_thread < least:
        return 0, 0  # threads of a block that work on different outputs: no split
    per_thread = ceil_div(nest.inputs, step_input * threads.height)

    # Spread one output over several blocks while the card has idle SMs.
    target = card.sm_count * (card.threads_per_sm // (width * threads.height))
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
