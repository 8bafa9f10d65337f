"""Gradient accumulation: the mean over all samples of an update, and its gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from budgetfit.errors import InputError


@dataclass(slots=True)
class AccumulationGroup:
    """The micro-batches since the last update, and their weights in the mean.

    The loss of a micro-batch is a mean over its samples, and the update needs the
    gradient of the mean over all samples of the group. The total weight is not known at
    the first backward: each loss is divided by the planned number of micro-batches and
    weighted relative to the first, and the accumulated gradient is scaled once at the
    end. With equal micro-batches, as many as planned, this is a division by their
    number.

    Attributes:
        planned: Micro-batches per update (``gradient_accumulation_steps``).
        first: Weight of the first one, for example 8 samples.
        total: Sum of weights so far, as multiples of the first.
        shares: Whether losses are shares of the group's mean already
            (``num_items_in_batch``).
        counted: Unit of the weights, for errors; empty if unknown.
    """

    planned: int
    count: int = 0
    first: float = 0.0
    total: float = 0.0
    shares: bool = False
    counted: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the planned number of micro-batches is reached."""
        return self.count >= self.planned

    @property
    def gradient_scale(self) -> float:
        """Factor for the accumulated gradients before the update."""
        return 1.0 if self.shares else self.planned / self.total

    def divisor(
        self, weight: float, *, share: bool = False, counted: str = ""
    ) -> float:
        """Add a micro-batch of some samples or tokens; return the divisor of its loss.

        ``share``: whether its loss is a share of the group's mean, so that losses only
        have to be summed. ``counted``: unit of the weight, for errors.

        Raises:
            InputError: If the weight is no positive number, or micro-batches of a group
                have weights of different units.
        """
        check_weight(weight)
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


def check_weight(weight: Any) -> float:
    """Return a micro-batch's weight as Python's number, which is saved."""
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise InputError(
            f"A micro-batch must weigh something in the mean, got weight={weight}. "
            "Pass the number of items that its loss is the mean of, or leave out a "
            "micro-batch that has none: of several ranks on all of them, or pass "
            "num_items_in_batch instead, which may be 0 on some."
        )
    return number


class AccumulatedGradients:
    """Detects changes of gradients and weights between micro-batches."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self._trained = trained
        self._weights: list[tuple[torch.dtype, int]] = []
        self._gradients: list[tuple[torch.Tensor | None, int]] = []

    def record(self) -> None:
        """Record gradients and version counters after a micro-batch; no copies."""
        self._weights = self._state_of_weights()
        self._gradients = [
            (weight.grad, version_of(weight.grad)) for weight in self._trained
        ]

    def clear(self) -> None:
        """Drop what was recorded: the gradients are about to be dropped."""
        self._weights, self._gradients = [], []

    def check(self, waiting: int) -> None:
        """Check before the next micro-batch that nothing has changed since ``record``.

        Raises:
            InputError: If gradients were dropped or changed, or weights written to.
        """
        before, weights = self._gradients, self._weights
        self.clear()
        if not before:
            return
        pairs = list(zip(self._trained, before, strict=True))
        if any(weight.grad is None and old is not None for weight, (old, _) in pairs):
            what = "their gradients were dropped (by zero_grad)"
        elif weights != self._state_of_weights():
            what = (
                "weights were written to or cast (by a step of an optimizer, or by "
                "model.half(), model.double() ...)"
            )
        elif any(
            weight.grad is not old or version_of(weight.grad) != version
            for weight, (old, version) in pairs
        ):
            what = (
                "their gradients were changed (by another backward pass, or by clipping"
                " that belongs in max_grad_norm=)"
            )
        else:
            return
        raise InputError(
            f"{waiting} micro-batches wait for an update, and since the last one "
            f"{what}: the update would not be that of their mean. Leave both to "
            "run.step until run.updated is True; the micro-batches so far are dropped."
        )

    def _state_of_weights(self) -> list[tuple[torch.dtype, int]]:
        return [(weight.dtype, version_of(weight)) for weight in self._trained]


def version_of(tensor: torch.Tensor | None) -> int:
    """Return a tensor's version counter (in-place writes)."""
    return 0 if tensor is None else tensor._version
