"""LengthTraces: one recipe's traces at all lengths of the samples, from a few of them.

A step runs the same ops at every length, and the bytes of its storages are polynomials
in the length, of degree two where every position meets every other (attention). But for
one thing: kernels want lengths that are multiples of 8, and PyTorch pads others. So
there are two programs, one for multiples of 8 and one for the other lengths. Three
traces of each give the bytes at any length; a fourth checks them.

Of images it is the number of pixels that the bytes are polynomials in: a feature map
has a share of the pixels, and each patch meets every other. That is exact where strides
and patches divide the sides, and nearly so elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.samples.image_sizes import SampleSizes
from budgetfit.core.step_trace import Affine, KernelScratch, StepTrace

if TYPE_CHECKING:
    Size = Any  # a length, or height and width

DEGREE: Final = 2
MOST_TRACES: Final = 48  # of one recipe


class LengthsNotTracedError(Exception):
    """The lengths have no common program, so that a sequence cannot be replayed."""


class LengthProgram:
    """One program at several traced lengths, and so at every length.

    Attributes:
        first: The trace at the shortest of them, of one batch size.
    """

    def __init__(
        self, traces: Mapping[Size, StepTrace], extent: Callable[[Size], int] = int
    ) -> None:
        """Take traces of one program and one batch size, by length.

        Raises:
            LengthsNotTracedError: If they differ in more than sizes.
        """
        self._extent = extent
        self._lengths = sorted(traces, key=extent)
        rows = [traces[length] for length in self._lengths]
        self.first = rows[0]
        for length, row in zip(self._lengths, rows, strict=True):
            if _structure(row) != _structure(self.first):
                raise LengthsNotTracedError(
                    f"sizes {self._lengths[0]} and {length} run different programs"
                )
        self._fixed = np.stack([row.fixed_bytes for row in rows]).astype(np.float64)
        # For each storage that a kernel's rule sizes: [lengths, arguments].
        self._arguments = [
            np.array([[each.fixed for each in row.arguments] for row in same])
            for same in zip(*map(_scratch_rows, rows), strict=True)
        ]
        self._made: dict[Size, StepTrace] = {}

    def at(self, length: Size) -> StepTrace:
        """Return the trace at a length; its events are the same object at each."""
        if length not in self._made:
            self._made[length] = self._trace(self._weights(length))
        return self._made[length]

    def _weights(self, length: Size) -> NDArray[np.float64]:
        nodes = [self._extent(each) for each in self._lengths]
        return _weights(nodes, self._extent(length))

    def _trace(self, weights: NDArray[np.float64]) -> StepTrace:
        """Return the trace whose values are these parts of the traced ones."""
        rows = [
            row._replace(
                arguments=tuple(Affine(n, 0) for n in _whole(weights @ values).tolist())
            )
            for row, values in zip(
                _scratch_rows(self.first), self._arguments, strict=True
            )
        ]
        known: dict[KernelScratch[Affine], int] = {}
        index = self.first.scratch_index.copy()
        index[index >= 0] = [known.setdefault(row, len(known)) for row in rows]
        return replace(
            self.first,
            fixed_bytes=_whole(weights @ self._fixed),
            scratch=tuple(known),
            scratch_index=index,
        )


class LengthTraces:
    """The traces of one recipe at every length that occurs.

    Attributes:
        traced: Lengths that were traced.
    """

    def __init__(
        self,
        trace_at: Callable[[Size], StepTrace],
        batch_size: int,
        lengths: SampleSizes,
        drawn: Iterable[Size] = (),
    ) -> None:
        """Trace a few lengths.

        ``trace_at`` traces the recipe at a length, or size of images, of which
        ``lengths`` are those that occur and ``drawn`` sizes drawn from them.

        Raises:
            LengthsNotTracedError: If they have no common program.
        """
        self._trace_at, self._batch_size = trace_at, batch_size
        self.traced: dict[Size, StepTrace] = {}
        self._frozen: dict[Size, StepTrace] = {}
        self._extent: Callable[[Size], int] = lengths.extent
        self._checked_at, self._most_error = lengths.checked_at, lengths.most_error
        self._programs = [
            found for alike in lengths.alike(drawn) for found in self._cut(alike)
        ]

    def program_at(self, length: Size) -> LengthProgram:
        """Return the program that runs at a length."""
        return next(found for lengths, found in self._programs if length in lengths)

    def _cut(
        self, lengths: Sequence[Size]
    ) -> Iterator[tuple[frozenset[Size], LengthProgram]]:
        """Yield programs by ascending lengths, each with those that it holds for."""
        # Another one begins where a length exceeds a window of the model.
        if not lengths:
            return
        spread = _spread(lengths, self._extent, self._checked_at)
        structures = [_structure(self._trace(each)) for each in spread]
        for place in range(len(spread) - 1):
            if structures[place] != structures[place + 1]:
                low, high = (
                    lengths.index(spread[place]),
                    lengths.index(spread[place + 1]),
                )
                while high - low > 1:
                    middle = (low + high) // 2
                    same = _structure(self._trace(lengths[middle])) == structures[place]
                    low, high = (middle, high) if same else (low, middle)
                yield from self._cut(lengths[:high])
                yield from self._cut(lengths[high:])
                return
        yield frozenset(lengths), self._checked(spread, lengths)

    def _trace(self, length: Size) -> StepTrace:
        if length not in self._frozen:
            if len(self.traced) == MOST_TRACES:
                raise LengthsNotTracedError(
                    f"sizes from {min(self.traced)} to {max(self.traced)} run too many "
                    "different programs"
                )
            trace = self.traced[length] = self._trace_at(length)
            size = self._batch_size
            self._frozen[length] = replace(trace.at_samples(size), batch_sizes=(size,))
        return self._frozen[length]

    def _checked(
        self, spread: Sequence[Size], lengths: Sequence[Size]
    ) -> LengthProgram:
        """Return the program of some lengths, one of which checks the others."""
        # Where it does not, all are traced, if they are few.
        rows = {length: self._trace(length) for length in spread}
        program = LengthProgram(rows, self._extent)
        if len(spread) <= DEGREE + 1:
            return program
        nodes = {spread[at] for at in (0, len(spread) // 2, -1)}
        known = LengthProgram({n: rows[n] for n in nodes}, self._extent)
        for checked in (n for n in spread if n not in nodes):
            told = int(known.at(checked).fixed_bytes.sum())
            actual = int(program.at(checked).fixed_bytes.sum())
            if abs(told - actual) <= self._most_error * actual:
                continue
            if len(lengths) <= MOST_TRACES - len(self.traced):
                every = {length: self._trace(length) for length in lengths}
                return LengthProgram(every, self._extent)
            raise LengthsNotTracedError(
                f"the {actual} bytes at {checked} do not follow from those at "
                f"{', '.join(map(str, sorted(nodes)))}: {told}"
            )
        return known


def _spread(
    lengths: Sequence[Size], extent: Callable[[Size], int], between: Iterable[float]
) -> list[Size]:
    """Return the ends of ascending lengths, the middle and those to be checked."""
    # 480x640 and 640x480 have the same bytes.
    lengths = list({extent(each): each for each in lengths}.values())
    last = len(lengths) - 1
    places = {int(last * part) for part in between}
    return [lengths[each] for each in sorted({0, last // 2, last, *places})]


def _structure(trace: StepTrace) -> tuple[Any, ...]:
    """Return what is the same at every length of one program."""
    rows = [(row.rule, row.part) for row in _scratch_rows(trace)]
    return (
        trace.events.tobytes(),
        trace.phases,
        trace.passes,
        (trace.scratch_index >= 0).tobytes(),
        rows,
    )


def _scratch_rows(trace: StepTrace) -> list[KernelScratch[Affine]]:
    """Return the kernel scratch of each storage that has one."""
    index = trace.scratch_index
    return [trace.scratch[row] for row in index[index >= 0].tolist()]


def _weights(nodes: Sequence[int], length: int) -> NDArray[np.float64]:
    """Return the weights of values at the nodes, by Lagrange's formula."""
    return np.array(
        [
            np.prod(
                [(length - other) / (node - other) for other in nodes if other != node]
            )
            for node in nodes
        ]
    )


def _whole(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round to whole numbers of at least 0."""
    return np.maximum(np.rint(values), 0).astype(np.int64)
