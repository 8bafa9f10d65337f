"""Sequence lengths of a data set, and the batches that a shuffled loader makes of them.

A batch is padded to the longest of its samples, as transformers' collators do.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from budgetfit.core.validation import python_number
from budgetfit.errors import InputError

ALIGNMENT: Final = 8  # positions; of what attention kernels read at once


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Histogram of sequence lengths.

    Attributes:
        counts: (length in tokens, samples), by length.
        max_length: Samples are truncated to it, and some batches may be padded to it;
            None: none are truncated.
        padded_to: Batches that are drawn are padded to a multiple of it.
    """

    counts: tuple[tuple[int, int], ...]
    max_length: int | None = None
    padded_to: int = 1
    # Where between the ends the bytes that follow from other lengths are checked, and
    # how far off all of them together may be.
    checked_at: ClassVar[tuple[float, ...]] = (1 / 3,)
    most_error: ClassVar[float] = 0.005

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(count for _, count in self.counts)

    @property
    def planned(self) -> int:
        """Length of the longest batch."""
        return self.max_length or self.counts[-1][0]

    @property
    def shortest(self) -> int:
        """Length of the shortest sample after truncation."""
        return min(self.counts[0][0], self.planned)

    @property
    def vary(self) -> bool:
        """Whether batches of several lengths occur."""
        return self.shortest < self.planned

    @property
    def cut(self) -> int:
        """Number of truncated samples."""
        return sum(count for length, count in self.counts if length > self.planned)

    @property
    def mean(self) -> float:
        """Mean number of tokens after truncation."""
        kept = (min(length, self.planned) * count for length, count in self.counts)
        return sum(kept) / self.samples

    @property
    def multiples(self) -> tuple[int, ...]:
        """Numbers of tokens to pad to multiples of; with the last all are as long."""
        # Collators know no longest length, and would pad it beyond what was planned.
        fitting = (n for n in (64, 128, 256, 512) if self.planned % n == 0)
        return (*(n for n in fitting if n < self.planned), self.planned)

    @property
    def kept(self) -> list[tuple[int, int]]:
        """Samples by length, after truncation."""
        return [(min(length, self.planned), count) for length, count in self.counts]

    @staticmethod
    def extent(length: int) -> int:
        """Return what the bytes of a step are a polynomial of: the length itself."""
        return length

    def padded(self, length: int, multiple: int) -> int:
        """Return the length as a multiple, but no longer than the longest."""
        return min(-(-length // multiple) * multiple, self.planned)

    def alike(self, _drawn: Iterable[int] = ()) -> list[Sequence[int]]:
        """Return ascending lengths that may run one program."""
        # Kernels want lengths that are multiples of 8, and PyTorch pads others.
        every = {self.planned, *(length for length, _ in self.kept)}
        multiples = (self.padded_to, *self.multiples)
        every |= {self.padded(length, n) for length in every for n in multiples}
        possible = sorted(every)
        return [
            [each for each in possible if each % ALIGNMENT == 0],
            [each for each in possible if each % ALIGNMENT],
        ]

    def span(self) -> str:
        """Describe the lengths: "samples of 64 to 512 tokens"."""
        return f"samples of {self.shortest} to {self.planned} tokens"

    def draw(
        self, batch_size: int, micro_batches: int, updates: int, seed: int
    ) -> list[tuple[int, ...]]:
        """Draw the longest of ``batch_size`` random lengths, for each micro-batch."""
        lengths = np.array([min(length, self.planned) for length, _ in self.counts])
        shares = np.array([count for _, count in self.counts]) / self.samples
        # The longest of n is the n-th root's quantile: drawn as one number each.
        uniform = np.random.default_rng(seed).random((updates, micro_batches))
        reached = uniform ** (1 / batch_size)
        places = np.searchsorted(np.cumsum(shares), reached, side="left")
        drawn = lengths[np.minimum(places, len(lengths) - 1)].tolist()
        return [tuple(self.padded(n, self.padded_to) for n in row) for row in drawn]

    def notes(self) -> tuple[str, ...]:
        """Describe the planned length."""
        notes = [
            (
                f"planned for samples of {self.shortest} to {self.planned} tokens "
                f"(the mean of {self.samples} is {self.mean:.1f}) in batches that are "
                "padded to their longest"
                if self.vary
                else f"planned for samples of {self.planned} tokens"
            )
        ]
        if self.cut:
            notes.append(
                f"{self.cut} of {self.samples} samples are longer than max_length "
                f"{self.planned} and are taken to be cut"
            )
        return tuple(notes)


def summarize_lengths(
    lengths: Iterable[int] | Mapping[int, int], max_length: int | None = None
) -> LengthSummary:
    """Summarize a list of lengths, or a mapping of length to number of samples.

    Raises:
        InputError: If it is neither or empty, or a length or count is not a positive
            whole number.
    """
    if getattr(lengths, "name", None) == "count" and hasattr(lengths, "items"):
        lengths = dict(lengths.items())  # of pandas' value_counts
    listed = isinstance(lengths, Iterable) and not isinstance(lengths, (str, bytes))
    if not listed or getattr(lengths, "shape", None) == ():  # a number of NumPy's
        raise InputError(
            "lengths must be a list of lengths such as [512, 2048], or samples by "
            f"length such as {{512: 900, 2048: 100}}; got {lengths!r}."
        )
    pairs = (
        lengths.items()
        if isinstance(lengths, Mapping)
        else ((length, 1) for length in lengths)
    )
    counted: Counter[int] = Counter()
    for pair in pairs:
        length, count = map(python_number, pair)
        for value in (length, count):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    "lengths must be whole numbers of at least 1: a list of lengths, "
                    "[512, 2048], or samples by length, {512: 900, 2048: 100}; got "
                    f"{value!r:.80}."
                )
        counted[length] += count
    if not counted:
        raise InputError("lengths is empty. Use for example lengths=[512, 2048].")
    return LengthSummary(tuple(sorted(counted.items())), max_length)
