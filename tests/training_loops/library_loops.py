"""Loops with a library's engine: accelerate, DeepSpeed and Lightning.

Each takes its settings, a plan or None for the library alone, and a folder to write in.
"""

import os
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from budgetfit.core.plan import Plan
from tests.models import seed
from tests.training_loops.families import Batch
from tests.training_loops.own_loops import PlainLoop, Trained, final_state, train
from tests.training_loops.settings import (
    BATCH_SIZE,
    LEARNING_RATE,
    Settings,
    plain_optimizer,
    scheduler_for,
)


def make_optimizer(
    model: nn.Module, plan: Plan | None, rate: float = LEARNING_RATE
) -> torch.optim.Optimizer:
    if plan is None:
        return plain_optimizer(model)
    made: torch.optim.Optimizer = plan.make_optimizer(model.parameters(), lr=rate)
    return made


def _evaluated(called: Any, batch: Batch) -> Tensor:
    called.eval()
    with torch.no_grad():
        loss: Tensor = called(**batch)["loss"]
    called.train()
    return loss


class AccelerateLoop(PlainLoop):
    """accelerate's loop as docs/integrations.md has it; without a plan, plain."""

    def __init__(
        self, model: nn.Module, settings: Settings, plan: Plan | None = None
    ) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        self.plan = plan
        word = "bf16" if settings.has("bf16") else "no"
        if plan is not None:
            self.prepared = plan.prepare(model)
            word = plan.to_accelerate_config()["mixed_precision"]
        self.accelerator = Accelerator(
            gradient_accumulation_steps=settings.accumulation,
            mixed_precision=word,
            cpu=True,
            step_scheduler_with_optimizer=False,
        )
        super().__init__(model, settings)
        self.called, self.optimizer = self.accelerator.prepare(model, self.optimizer)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.plan)

    def step(self, batch: Batch) -> Tensor:
        with self.accelerator.accumulate(self.called):
            loss: Tensor = self.called(**batch)["loss"]
            self.accelerator.backward(loss)
            updates = self.accelerator.sync_gradients
            if updates and self.settings.max_norm is not None:
                self.accelerator.clip_grad_norm_(
                    self.called.parameters(), self.settings.max_norm
                )
            self.optimizer.step()
            if updates:
                self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def evaluate(self, batch: Batch) -> Tensor:
        return _evaluated(self.called, batch)

    def close(self) -> None:
        self.accelerator.free_memory()
        if self.plan is not None:
            self.prepared.undo()


class DeepSpeedLoop(PlainLoop):
    """DeepSpeed's engine in one process, ZeRO 0."""

    def __init__(
        self, model: nn.Module, settings: Settings, plan: Plan | None = None
    ) -> None:
        import deepspeed

        alone_in_the_world()
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "gradient_accumulation_steps": settings.accumulation,
            "zero_optimization": {"stage": 0},
        }
        if settings.has("bf16"):
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        self.plan = plan
        if plan is not None:
            self.prepared = plan.prepare(model)
            config = plan.to_deepspeed_config()
        config["gradient_clipping"] = settings.max_norm or 0.0
        self.config, self.deepspeed = config, deepspeed
        super().__init__(model, settings)
        self.called, *_ = self.deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=config
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.plan)

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self.called(**batch)["loss"]
        self.called.backward(loss)
        updates = self.called.is_gradient_accumulation_boundary()
        self.called.step()
        if updates:
            self.scheduler.step()
        return loss.detach()

    def evaluate(self, batch: Batch) -> Tensor:
        return _evaluated(self.called, batch)

    def close(self) -> None:
        self.called.destroy()
        if self.plan is not None:
            self.prepared.undo()


def alone_in_the_world() -> None:
    """Make this process the only one of a group, which DeepSpeed wants."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    )


def with_accelerate(settings: Settings, plan: Plan | None, _: Path) -> Trained:
    return train(settings, plan, AccelerateLoop, AccelerateLoop)


def with_deepspeed(settings: Settings, plan: Plan | None, _: Path) -> Trained:
    return train(settings, plan, DeepSpeedLoop, DeepSpeedLoop)


def with_lightning(settings: Settings, plan: Plan | None, folder: Path) -> Trained:
    """``Trainer.fit``; a saved state is a checkpoint that another Trainer fits on."""
    import lightning

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            losses.append(self.net(**batch)["loss"].item())

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self, plan)
            scheduler = scheduler_for(optimizer, settings)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    given: dict[str, Any] = {
        "devices": 1,
        "precision": "bf16-mixed" if settings.has("bf16") else "32-true",
        "accumulate_grad_batches": settings.accumulation,
    }
    if plan is not None:
        given = {**plan.to_lightning_arguments()}
        given["callbacks"] = [plan.lightning_callback()]
    evaluates = settings.has("evaluate")
    given |= {
        "gradient_clip_val": settings.max_norm,
        "accelerator": "cpu",
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        "limit_val_batches": None if evaluates else 0,
        "val_check_interval": settings.evaluates_every * settings.accumulation
        if evaluates
        else None,
        "check_val_every_n_epoch": None if evaluates else 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    loaders = {
        "train_dataloaders": DataLoader(settings.batches(), batch_size=None),
        "val_dataloaders": DataLoader(settings.batches(7)[:2], batch_size=None),
    }
    counts: Counter[str] = Counter()
    path = None
    ends = [settings.halfway] if settings.has("resume") else []
    for number, end in enumerate([*ends, settings.updates]):
        module = Module(settings.model(counts, number))
        trainer = lightning.Trainer(**given, max_steps=end)
        seed(5)  # Lightning saves no random numbers
        trainer.fit(module, **loaders, ckpt_path=path)
        path = folder / "half.ckpt"
        trainer.save_checkpoint(path)
    return Trained(losses, final_state(module.net), sum(counts.values()))
