"""Optimizer update: unscale, scale, clip and step."""

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from budgetfit.applying.zero import ZeroOptimizer
from budgetfit.errors import InputError

# Optimizers of these packages step with torch ops, which bump version counters. Others
# may write through raw pointers.
_VERSION_COUNTING_LIBRARIES = ("torch", "transformers", "budgetfit")


class OptimizerUpdate:
    """Updates the weights with the accumulated gradients."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Sequence[nn.Parameter],
        device_type: str,
    ) -> None:
        self._optimizer = optimizer
        self._trained = trained
        self._fake = any(isinstance(item, FakeTensor) for item in trained)
        # Torch's default on CUDA; fake tensors are on the CPU and would not get it.
        self._foreach = True if device_type == "cuda" else None
        self._versions_before: list[int] | None = None

    def __call__(
        self,
        scaler: torch.amp.GradScaler | None,
        *,
        max_grad_norm: float | None,
        gradient_scale: float,
    ) -> bool:
        """Unscale, scale, clip and step; gradients are kept.

        ``max_grad_norm``: clip to this total norm, after unscaling and scaling by
        ``gradient_scale``.

        Returns:
            False if the scaler skipped the step, because gradients overflowed.
        """
        self._versions_before = None
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        if isinstance(self._optimizer, ZeroOptimizer):  # the engine has the gradients
            self._optimizer.prepare(gradient_scale, max_grad_norm)
            gradient_scale, max_grad_norm = 1.0, None
        if gradient_scale != 1.0:
            gradients = [item.grad for item in self._trained if item.grad is not None]
            if gradients:  # none: this update trains what is in no optimizer
                torch._foreach_mul_(gradients, gradient_scale)
            del gradients
        if max_grad_norm is not None:
            self._refuse_sparse()
            torch.nn.utils.clip_grad_norm_(
                self._trained, max_grad_norm, foreach=self._foreach
            )
        is_first = not self._optimizer.state
        self._versions_before = self._versions()
        try:
            updated = self._step(scaler)
        except BaseException:
            if is_first:  # an incomplete state would break the next step
                self._optimizer.state.clear()
            raise
        self._versions_before = None  # later errors are not the optimizer's
        return updated

    def weights_intact(self) -> bool:
        """Return whether an interrupted update has not changed any weight yet."""
        if getattr(self._optimizer, "has_stepped", False):  # in the backward pass
            return False
        if self._versions_before is None:
            return True
        known = all(
            base.__module__.partition(".")[0]
            in (*_VERSION_COUNTING_LIBRARIES, "builtins")
            for base in type(self._optimizer).__mro__
        )
        return known and self._versions_before == self._versions()

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
        # Fused optimizers skip the step on the device; only the scale shows it. Reading
        # the scale synchronizes; fake tensors have no value.
        before = 0.0 if self._fake else scaler.get_scale()
        scaler.step(self._optimizer)
        scaler.update()
        return self._fake or scaler.get_scale() >= before

    def _versions(self) -> list[int]:
        """Return the version counters of all weights and states."""
        states = tree_leaves(dict(self._optimizer.state))
        return [
            item._version
            for item in (*self._trained, *states)
            if isinstance(item, torch.Tensor)
        ]
