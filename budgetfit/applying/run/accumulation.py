"""The group of micro-batches between two updates, and the mean over their samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from budgetfit.errors import InputError


@dataclass(slots=True)
class Group:
    """What came since the last update, and what each micro-batch counts in the mean.

    The loss of a micro-batch is a mean over its samples, and the gradient that is
    wanted is that of the mean over all samples of the group. How many those will be is
    not known when the first one is differentiated: each loss is divided by the planned
    number of micro-batches and weighed against the first, and the sum of gradients is
    scaled once at the end. With equal micro-batches, as many as planned, that is a
    division by their number and nothing else.

    Attributes:
        planned: Micro-batches per update.
        count: How many came.
        first: What the first one counts, for example 8 samples.
        total: What all that came count together, as multiples of the first.
        shares: Whether losses are shares of the group's mean already.
        counted: In what they are weighed, in words; empty where nobody said.
    """

    planned: int
    count: int = 0
    first: float = 0.0
    total: float = 0.0
    shares: bool = False
    counted: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether it is time for an update."""
        return self.count >= self.planned

    @property
    def gradient_scale(self) -> float:
        """What the sum of gradients is to be multiplied by before the update."""
        return 1.0 if self.shares else self.planned / self.total

    def divisor(
        self, weight: float, *, share: bool = False, counted: str = ""
    ) -> float:
        """Take in a micro-batch; return what its loss is to be divided by.

        Args:
            weight: What it counts: its samples, or its tokens.
            share: Whether its loss is a share of the group's mean, so that shares only
                have to be added up.
            counted: In what it is weighed, in words.

        Raises:
            InputError: If the weight is no positive number, or micro-batches of a group
                are weighed in different ways.
        """
        if not (math.isfinite(weight) and weight > 0):
            raise InputError(
                f"A micro-batch must weigh something in the mean, got weight={weight}. "
                "Pass the number of items that its loss is the mean of, or leave out a "
                "micro-batch that has none."
            )
        if self.count and share != self.shares:
            raise InputError(
                "num_items_in_batch must be given for all micro-batches of a group or "
                "for none: their losses would not add up."
            )
        if self.count and self.counted and counted != self.counted:
            raise InputError(
                f"This micro-batch is weighed by {counted}, and the one before it in "
                f"this update by {self.counted}: they make no mean. Give all of an "
                "update the same; num_items_in_batch is that of all of them together."
            )
        if self.count == 0:
            self.counted = counted
            self.first, self.total, self.shares = weight, 0.0, share
        relative = 1.0 if share else weight / self.first
        self.count += 1
        self.total += relative
        return 1.0 if share else self.planned / relative

    def state(self) -> dict[str, Any]:
        """Return the group as plain numbers."""
        return {
            "planned": self.planned,
            "count": self.count,
            "first": self.first,
            "total": self.total,
            "shares": self.shares,
            "counted": self.counted,
        }
