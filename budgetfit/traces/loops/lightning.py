"""Lightning's ``Trainer.fit``, run as installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from budgetfit.applying.loss.call_model import compute_loss
from budgetfit.traces.loops.host_batch import HostBatches

if TYPE_CHECKING:
    import torch

    from budgetfit.traces.loops.prepare import Prepared

_PRECISIONS: dict[str, Any] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


class LightningLoop:
    """``lightning.Trainer.fit``; the module's ``training_step`` returns the loss."""

    def __init__(self, prepared: Prepared) -> None:
        self.copies = prepared.copies
        self._prepared = prepared
        self.optimizer = prepared.make_optimizer(list(prepared.model.parameters()))

    def run(self, load: Callable[[], Any]) -> None:
        """Train on batches until ``load`` raises."""
        import lightning  # noqa: PLC0415 - slow import
        from lightning.pytorch.plugins import MixedPrecision  # noqa: PLC0415

        prepared = self._prepared
        autocast = prepared.precision.autocast
        plugins: Any = None
        if autocast is not None:
            plugins = MixedPrecision(_PRECISIONS[autocast], "cpu")
        lightning.Trainer(
            accelerator="cpu",
            devices=1,
            plugins=plugins,
            max_epochs=1,
            accumulate_grad_batches=prepared.recipe.gradient_accumulation_steps,
            gradient_clip_val=prepared.loop.max_grad_norm,
            callbacks=[_average(prepared)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(_module(prepared, self.optimizer), HostBatches(load))


def _module(prepared: Prepared, optimizer: torch.optim.Optimizer) -> Any:
    import lightning  # noqa: PLC0415 - slow import

    class Module(lightning.LightningModule):
        """As in Lightning's documentation."""

        def __init__(self) -> None:
            super().__init__()
            self.net = prepared.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return compute_loss(
                self.net, batch, prepared.loss, on_missing_loss=prepared.on_missing_loss
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    return Module()


def _average(prepared: Prepared) -> Any:
    import lightning  # noqa: PLC0415 - slow import

    class Average(lightning.Callback):
        """Updates the second copy of the weights after each step of the optimizer."""

        steps = 0

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step > self.steps:
                prepared.update_average()
            self.steps = trainer.global_step

    return Average()
