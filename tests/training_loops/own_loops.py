"""Loops that somebody writes out: plain, by ``Run``, with a prepared model, with DDP.

Each loop is a class: how one micro-batch trains, how a state is saved and loaded. What
goes around that, ``train`` does, the same for all of them.
"""

import io
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import budgetfit
from budgetfit.core.plan import Plan
from tests.models import seed
from tests.training_loops.families import Batch, collate
from tests.training_loops.settings import (
    BATCH_SIZE,
    LEARNING_RATE,
    Settings,
    plain_optimizer,
    scheduler_for,
)


class Trained(NamedTuple):
    """What a training was: losses in order (evaluations too), and what it left.

    ``block_runs`` is how many times a block ran, of all blocks together.
    """

    losses: list[float]
    final: dict[str, Tensor]
    block_runs: int


class PlainLoop:
    """A loop of torch alone."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model = self.called = model
        self.settings = settings
        self.waiting = 0
        self.optimizer = self.make_optimizer()
        self.scheduler = scheduler_for(self.optimizer, settings)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return plain_optimizer(self.model)

    def autocast(self) -> AbstractContextManager[Any]:
        mixed = self.settings.has("bf16")
        return torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext()

    def step(self, batch: Batch) -> Tensor:
        """Train on one micro-batch; return its loss."""
        with self.autocast():
            loss = self.called(**batch)["loss"]
        (loss / self.settings.accumulation).backward()
        self.waiting += 1
        if self.waiting == self.settings.accumulation:
            self.update()
        return loss.detach()

    def update(self) -> None:
        if self.settings.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.settings.max_norm
            )
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.waiting = 0

    def evaluate(self, batch: Batch) -> Tensor:
        """Return a loss in evaluation mode, and go on in training mode."""
        self.called.eval()
        with torch.no_grad(), self.autocast():
            loss: Tensor = self.called(**batch)["loss"]
        self.called.train()
        return loss

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])

    def close(self) -> None:
        """End the loop; the model is then the plain one."""


class RunLoop(PlainLoop):
    """``budgetfit.apply`` and ``run.step``."""

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan) -> None:
        self.run = budgetfit.apply(plan, model)
        super().__init__(model, settings)

    def make_optimizer(self) -> torch.optim.Optimizer:
        for group in self.run.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        return self.run.optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        return self.run.autocast()

    def step(self, batch: Batch) -> Tensor:
        loss = self.run.step(batch, max_grad_norm=self.settings.max_norm)
        if self.run.updated:
            self.scheduler.step()
        return loss

    def evaluate(self, batch: Batch) -> Tensor:
        self.run.model.eval()  # and the next step trains again by itself
        with torch.no_grad(), self.autocast():
            loss: Tensor = self.run.model(**batch)["loss"]
        return loss

    def state(self) -> dict[str, Any]:
        return {"run": self.run.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.run.load_state_dict(state["run"])
        self.scheduler.load_state_dict(state["scheduler"])

    def close(self) -> None:
        self.run.undo()


class PreparedLoop(PlainLoop):
    """The plain loop with ``plan.prepare(model)`` in front."""

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan) -> None:
        self.plan = plan
        self.prepared = plan.prepare(model)
        super().__init__(model, settings)

    def make_optimizer(self) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.plan.make_optimizer(
            self.model.parameters(), lr=LEARNING_RATE
        )
        return made

    def close(self) -> None:
        self.prepared.undo()


class PlainDDP(PlainLoop):
    """The plain loop under data parallelism."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        super().__init__(model, settings)
        self.called = DistributedDataParallel(model)


class RunDDP(RunLoop):
    """``run.step`` under data parallelism, as docs/training.md says."""

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan) -> None:
        super().__init__(model, settings, plan)
        self.run.model = DistributedDataParallel(self.run.model)


class PreparedDDP(PreparedLoop):
    """A prepared model under data parallelism, in a loop of one's own."""

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan) -> None:
        super().__init__(model, settings, plan)
        self.called = DistributedDataParallel(model)


def train(
    settings: Settings,
    plan: Plan | None,
    plain: type[PlainLoop],
    planned: Any,
    *,
    rank: int = 0,
) -> Trained:
    """Train from always the same weights; with a plan, by the planned loop.

    Args:
        settings: What is trained, and how.
        plan: None for the plain loop.
        plain: The class of the loop without budgetfit.
        planned: The class of the other one, that takes the plan too.
        rank: Of this process, which has batches of its own.
    """
    counts: Counter[str] = Counter()

    def begin(seed: int) -> PlainLoop:
        model = settings.model(counts, seed)
        if plan is None:
            return plain(model, settings)
        loop: PlainLoop = planned(model, settings, plan)
        return loop

    loop = begin(0)
    unseen = collate(settings.family.samples(BATCH_SIZE, seed=9))
    losses: list[float] = []
    seed(5 + rank)
    for number, batch in enumerate(settings.batches(rank), start=1):
        losses.append(loop.step(batch).item())
        updates, waiting = divmod(number, settings.accumulation)
        if waiting:
            continue
        if settings.has("evaluate") and updates % settings.evaluates_every == 0:
            losses.append(loop.evaluate(batch).item())
            losses.append(loop.evaluate(unseen).item())
        if settings.has("resume") and updates == settings.halfway:
            saved = io.BytesIO()
            torch.save(loop.state(), saved)
            saved.seek(0)
            loop.close()
            loop = begin(1)
            loop.load(torch.load(saved, weights_only=True))
    final = final_state(loop.model)
    loop.close()
    return Trained(losses, final, sum(counts.values()))


def final_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of weights and buffers, and where the random numbers are."""
    final = {name: item.detach().clone() for name, item in model.state_dict().items()}
    # What a training leaves behind decides what comes after it.
    return {**final, "random numbers": torch.get_rng_state()}
