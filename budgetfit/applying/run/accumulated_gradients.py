"""Detect changes of accumulated gradients and weights between micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn


class AccumulatedGradients:
    """Version counters of gradients and weights after a micro-batch.

    Args:
        trained: The parameters of the run's optimizer.
    """

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self._trained = trained
        self._weights: list[int] = []
        self._gradients: list[tuple[torch.Tensor | None, int]] = []

    def record(self) -> None:
        """Record gradients and version counters after a micro-batch; no copies."""
        self._weights = [_version(weight) for weight in self._trained]
        self._gradients = [
            (weight.grad, _version(weight.grad)) for weight in self._trained
        ]

    def clear(self) -> None:
        """Drop what was recorded: the gradients are about to be dropped."""
        self._weights, self._gradients = [], []

    def check(self, waiting: int) -> None:
        """Check before the next micro-batch that nothing has changed since ``record``.

        Args:
            waiting: Number of accumulated micro-batches, for the error.

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
        elif weights != [_version(weight) for weight in self._trained]:
            what = "weights were written to (by a step of an optimizer)"
        elif any(
            weight.grad is not old or _version(weight.grad) != version
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


def _version(tensor: torch.Tensor | None) -> int:
    """Return a tensor's version counter (in-place writes)."""
    return 0 if tensor is None else tensor._version
