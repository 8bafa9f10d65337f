"""Samples of many lengths: what to plan for, and what padding to it wastes.

Memory is decided by the longest sample: a batch of those comes sooner or later, and it
must fit. Time is spent on padding as on anything else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

WORTH_SAYING = 0.01  # of all tokens


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """How many samples there are of each length.

    Attributes:
        counts: (length in tokens, samples), by length.
        max_length: Longer samples are cut to it, and all are padded to it; None for
            padding to the longest.
    """

    counts: tuple[tuple[int, int], ...]
    max_length: int | None = None

    @property
    def samples(self) -> int:
        """Samples of all lengths."""
        return sum(count for _, count in self.counts)

    @property
    def planned(self) -> int:
        """Positions of a padded sample."""
        return self.max_length or self.counts[-1][0]

    @property
    def cut(self) -> int:
        """Samples that lose tokens because they are longer than what is planned."""
        return sum(count for length, count in self.counts if length > self.planned)

    @property
    def mean(self) -> float:
        """Tokens of the average sample, as far as they are not cut off."""
        kept = (min(length, self.planned) * count for length, count in self.counts)
        return sum(kept) / self.samples

    @property
    def padding_share(self) -> float:
        """The share of all positions that holds padding: 1 - mean / planned."""
        return 1 - self.mean / self.planned

    def notes(self) -> tuple[str, ...]:
        """Say what was planned for, and what that costs, in plain words."""
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
        """Say what batches without padding could reach, if that is worth it.

        Time is taken to grow with the positions; attention's share grows faster, so
        that the gain would be more rather than less, and fixed costs less.

        Args:
            samples_per_s: Of the plan, all samples padded.
        """
        if self.padding_share < WORTH_SAYING:
            return ()
        rate = samples_per_s / (1 - self.padding_share)
        return (
            (
                f"batches padded to the mean length alone would make about {rate:.1f} "
                f"samples per second instead of {samples_per_s:.1f}: group samples by "
                "length (group_by_length, or length bucketing in the sampler)"
            ),
        )


def summarize(
    lengths: Iterable[int] | Mapping[int, int], max_length: int | None = None
) -> LengthSummary:
    """Return the summary of a list of lengths, or of a mapping of length to samples.

    Raises:
        InputError: If there is none, or one is no whole number of at least 1.
    """
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
