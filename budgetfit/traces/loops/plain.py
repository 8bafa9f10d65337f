"""The loop of PyTorch's tutorials, which keeps the outputs until the next ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from budgetfit.applying.loss.call_model import call_model, find_loss
from budgetfit.applying.precision import autocast_context, cast_batch, make_scaler
from budgetfit.traces.loops.host_batch import HostBatches

if TYPE_CHECKING:
    from budgetfit.traces.loops.prepare import Prepared

_CPU = torch.device("cpu")  # where the fakes are


class PlainLoop:
    """Forward, loss, backward, step and ``zero_grad`` in a ``for``.

    The names of the loop live as in ``for batch in loader``: ``outputs`` and ``loss``
    until the next forward has made new ones, ``batch`` until the loader hands out the
    next one.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.copies = prepared.copies
        self._prepared = prepared
        self._scaler = make_scaler(prepared.precision, "cpu")
        self.optimizer = prepared.make_optimizer(list(prepared.model.parameters()))

    def run(self, load: Callable[[], Any]) -> None:
        """Train on batches until ``load`` raises."""
        prepared, scaler, optimizer = self._prepared, self._scaler, self.optimizer
        model, precision = prepared.model, prepared.precision
        accumulation = prepared.recipe.gradient_accumulation_steps
        for number, batch in enumerate(HostBatches(load), start=1):
            batch = cast_batch(batch.to(_CPU), precision, _CPU)  # noqa: PLW2901
            with autocast_context(precision, "cpu"):
                outputs = call_model(model, batch, for_loss=prepared.loss is not None)
                loss = find_loss(
                    outputs, batch, prepared.loss, prepared.on_missing_loss
                )
            if accumulation > 1:
                loss = loss / accumulation
            (loss if scaler is None else scaler.scale(loss)).backward()
            if number % accumulation:
                continue
            if prepared.loop.max_grad_norm is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(
                    model.parameters(),
                    prepared.loop.max_grad_norm,
                    foreach=True,  # as on CUDA
                )
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            prepared.update_average()
            optimizer.zero_grad(set_to_none=prepared.loop.set_to_none)
