"""One update of the weights: unscale, clip, step, and what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

# Whose steps are made of torch's own ops, which count what they write to. Others may
# write through pointers.
_COUNTED = ("torch", "transformers", "budgetfit")


class WeightUpdate:
    """Brings gathered gradients into the weights.

    Args:
        optimizer: Over ``trained``.
        trained: The parameters.
        device_type: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Sequence[nn.Parameter],
        device_type: str,
    ) -> None:
        self._optimizer = optimizer
        self._trained = trained
        self._fake = any(isinstance(item, FakeTensor) for item in trained)
        # On CUDA clipping takes all gradients at once; fake ones must be told (M44).
        self._foreach = True if device_type == "cuda" else None
        self._writes: list[int] | None = None

    def __call__(
        self,
        scaler: torch.amp.GradScaler | None,
        *,
        max_grad_norm: float | None,
        gradient_scale: float,
    ) -> bool:
        """Update once, in the order of applying P4; gradients stay where they are.

        Args:
            scaler: Unscales before anything reads the gradients; None without one.
            max_grad_norm: Clip to this total norm, after unscaling and scaling.
            gradient_scale: What gradients are multiplied by first.

        Returns:
            False if the scaler left the step out, because gradients overflowed.
        """
        self._writes = None
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        if gradient_scale != 1.0:
            gradients = [item.grad for item in self._trained if item.grad is not None]
            torch._foreach_mul_(gradients, gradient_scale)
            del gradients
        if max_grad_norm is not None:
            self._refuse_sparse()
            torch.nn.utils.clip_grad_norm_(
                self._trained, max_grad_norm, foreach=self._foreach
            )
        is_first = not self._optimizer.state
        self._writes = self._count_writes()
        try:
            updated = self._step(scaler)
        except BaseException:
            if is_first:  # half of a state would break the next step
                self._optimizer.state.clear()
            raise
        self._writes = None  # an error after this is none of the optimizer's
        return updated

    def left_intact(self) -> bool:
        """Say whether an update that an error stopped had changed nothing yet."""
        if getattr(self._optimizer, "has_stepped", False):  # in the backward pass
            return False
        if self._writes is None:
            return True
        known = all(
            base.__module__.partition(".")[0] in (*_COUNTED, "builtins")
            for base in type(self._optimizer).__mro__
        )
        return known and self._writes == self._count_writes()

    def _refuse_sparse(self) -> None:
        if any(item.grad is not None and item.grad.is_sparse for item in self._trained):
            raise InputError(
                "Sparse gradients have no norm in torch and cannot be clipped. Leave "
                "max_grad_norm out, or make the embedding with sparse=False."
            )

    def _step(self, scaler: torch.amp.GradScaler | None) -> bool:
        if scaler is None:
            self._optimizer.step()
            return True
        # Fused optimizers leave the step out on the device, so that only the scale
        # tells. Asking waits for the device; fake tensors have no answer.
        before = 0.0 if self._fake else scaler.get_scale()
        scaler.step(self._optimizer)
        scaler.update()
        return self._fake or scaler.get_scale() >= before

    def _count_writes(self) -> list[int]:
        """Return how often each weight and state was written to in place."""
        states = tree_leaves(dict(self._optimizer.state))
        return [
            item._version  # noqa: SLF001 - torch has no other name for it
            for item in (*self._trained, *states)
            if isinstance(item, torch.Tensor)
        ]
