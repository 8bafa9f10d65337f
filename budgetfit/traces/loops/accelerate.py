"""The loop of accelerate's documentation, with the installed ``Accelerator``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from budgetfit.applying.loss.call_model import call_model, find_loss
from budgetfit.applying.precision import make_scaler
from budgetfit.core.precision import Precision
from budgetfit.traces.loops.host_batch import HostBatches

if TYPE_CHECKING:
    from budgetfit.traces.loops.prepare import Prepared


class AccelerateLoop:
    """``accelerator.prepare``, ``accumulate`` and ``backward`` in a ``for``."""

    def __init__(self, prepared: Prepared) -> None:
        self.copies = prepared.copies
        accelerate: Any = importlib.import_module("accelerate")
        self._prepared = prepared
        self._accelerator = accelerator = accelerate.Accelerator(
            cpu=True,
            mixed_precision=prepared.precision.autocast or "no",
            gradient_accumulation_steps=prepared.recipe.gradient_accumulation_steps,
        )
        scale_as_on_cuda(accelerator, prepared.precision)
        optimizer = prepared.make_optimizer(list(prepared.model.parameters()))
        self._model, self.optimizer = accelerator.prepare(prepared.model, optimizer)

    def run(self, load: Callable[[], Any]) -> None:
        """Train on batches until ``load`` raises."""
        prepared, accelerator = self._prepared, self._accelerator
        model, optimizer = self._model, self.optimizer
        for batch in prepared_loader(accelerator, load):
            with accelerator.accumulate(model):
                outputs = call_model(model, batch, for_loss=prepared.loss is not None)
                loss = find_loss(
                    outputs, batch, prepared.loss, prepared.on_missing_loss
                )
                accelerator.backward(loss)
                norm = prepared.loop.max_grad_norm
                if norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), norm)
                optimizer.step()
                if accelerator.sync_gradients:
                    prepared.update_average()
                optimizer.zero_grad(set_to_none=prepared.loop.set_to_none)


def prepared_loader(accelerator: Any, load: Callable[[], Any]) -> Any:
    """Return accelerate's loader; batches are allocated when it moves them."""
    # Its own iteration is used, which holds and moves the batches; torch's beneath it
    # would draw random numbers, which fakes do not have.
    loader = accelerator.prepare_data_loader(DataLoader([0]))  # type: ignore[arg-type]
    loader.rng_types = None
    loader.base_dataloader = _HostLoader(loader.base_dataloader, load)
    return loader


class _HostLoader(HostBatches):
    """A data loader of torch with other batches."""

    def __init__(self, loader: Any, load: Callable[[], Any]) -> None:
        super().__init__(load)
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def scale_as_on_cuda(accelerator: Any, precision: Precision) -> None:
    """Give an accelerator fp16's autocast and scaler, which it leaves out on a CPU."""
    if precision.autocast == "fp16":
        accelerator.native_amp = True
        accelerator.scaler = make_scaler(precision, "cpu")
