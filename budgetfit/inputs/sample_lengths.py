"""Sequence lengths of a data set: the length to plan for, and the cost of padding.

A batch of the longest samples must fit. Padding takes as much time as tokens do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NOTABLE_PADDING_SHARE = 0.01  # share of all positions


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Histogram of sequence lengths.

    Attributes:
        counts: (length in tokens, samples), by length.
        max_length: Samples are truncated and padded to it; None: padded to the longest.
    """

    counts: tuple[tuple[int, int], ...]
    max_length: int | None = None

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(count for _, count in self.counts)

    @property
    def planned(self) -> int:
        """Length of a padded sample."""
        return self.max_length or self.counts[-1][0]

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
    def padding_share(self) -> float:
        """Share of padding in all positions: 1 - mean / planned."""
        return 1 - self.mean / self.planned

    def notes(self) -> tuple[str, ...]:
        """Describe the planned length and the cost of padding."""
        notes = [
            (
                f"planned for samples of {self.planned} tokens; the mean of "
                f"{self.samples} is {self.mean:.1f}, so padding all to {self.planned} "
                f"spends {self.padding_share:.1%} of the positions on padding"
            )
        ]
        if self.cut:
            notes.append(
                f"{self.cut} of {self.samples} samples are longer than max_length "
                f"{self.planned} and are taken to be cut"
            )
        return tuple(notes)

    def rate_notes(self, samples_per_s: float) -> tuple[str, ...]:
        """Return a note on the throughput of packing without padding, if it is notable.

        Time is assumed proportional to positions. Attention grows faster, fixed costs
        do not grow.

        Args:
            samples_per_s: Of the plan, with padding.
        """
        if self.padding_share < NOTABLE_PADDING_SHARE:
            return ()
        rate = samples_per_s / (1 - self.padding_share)
        return (
            (
                f"batches padded to the mean length alone would make about {rate:.1f} "
                f"samples per second instead of {samples_per_s:.1f}: group samples by "
                "length (group_by_length, or length bucketing in the sampler)"
            ),
        )


def summarize_lengths(
    lengths: Iterable[int] | Mapping[int, int], max_length: int | None = None
) -> LengthSummary:
    """Summarize a list of lengths, or a mapping of length to number of samples.

    Raises:
        InputError: If it is neither or empty, or a length or count is not a positive
            whole number.
    """
    if isinstance(lengths, (str, bytes, int)):
        raise InputError(
            "lengths must be a list of lengths such as [512, 2048], or samples by "
            f"length such as {{512: 900, 2048: 100}}; got {lengths!r}."
        )
    counted = Counter(lengths)
    for length, count in counted.items():
        for value in (length, count):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    "lengths must be whole numbers of at least 1: a list of lengths, "
                    "[512, 2048], or samples by length, {512: 900, 2048: 100}; got "
                    f"{value!r}."
                )
    if not counted:
        raise InputError("lengths is empty. Use for example lengths=[512, 2048].")
    return LengthSummary(tuple(sorted(counted.items())), max_length)
