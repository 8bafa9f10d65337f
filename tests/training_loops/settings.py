"""What people do in a loop beside forward, backward and step; and a plan for it."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Recipe, Segment
from tests.models import counting_hook
from tests.reporting.sample_plans import sample_estimate, sample_model, sample_plan
from tests.training_loops.families import FAMILIES, Batch, Family, collate

BATCH_SIZE = 2
LEARNING_RATE = 1e-3
MAX_NORM = 0.5  # below what the norms are, so that clipping does something
HABITS = ("bf16", "accumulate", "clip", "schedule", "evaluate", "resume", "freeze")


@dataclass(frozen=True)
class Settings:
    """A family, what is done in its loop, and for how many updates.

    Attributes:
        name: Of the family that is trained.
        habits: Words of ``HABITS``: bf16 autocast, 2 micro-batches to an update,
            clipping, a learning rate that changes, evaluation every 10th update, a new
            model that goes on from a saved state after half of the updates, frozen
            embeddings and first block.
        updates: Optimizer steps.
    """

    name: str
    habits: frozenset[str] = frozenset()
    updates: int = 30

    def __post_init__(self) -> None:
        unknown = self.habits - set(HABITS)
        assert not unknown, unknown

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]

    @property
    def accumulation(self) -> int:
        """Micro-batches in an update."""
        return 2 if "accumulate" in self.habits else 1

    @property
    def micro_batches(self) -> int:
        return self.updates * self.accumulation

    @property
    def halfway(self) -> int:
        """Updates before the state is saved."""
        return self.updates // 2

    @property
    def evaluates_every(self) -> int:
        return max(self.updates // 3, 1)

    @property
    def max_norm(self) -> float | None:
        return MAX_NORM if "clip" in self.habits else None

    def has(self, habit: str) -> bool:
        return habit in self.habits

    def model(self, counts: Counter[str], seed: int = 0) -> nn.Module:
        """Return the model, some of it frozen; its blocks count how often they run."""
        model = self.family.model(seed)
        if self.has("freeze"):
            for name, parameter in model.named_parameters():
                if name.startswith(self.family.frozen):
                    parameter.requires_grad_(requires_grad=False)
        for name in [name for chain in self.family.chains for name in chain]:
            # A layer inside: hooks of a block stay outside of transformers' checkpoint.
            inner = next(
                each
                for each in model.get_submodule(name).modules()
                if isinstance(each, (nn.Linear, nn.Conv2d))
                or type(each).__name__ == "Conv1D"
            )
            inner.register_forward_pre_hook(counting_hook(counts, name))
        return model

    def batches(self, rank: int = 0) -> list[Batch]:
        """Return all micro-batches; each process of several has its own."""
        samples = self.family.samples(self.micro_batches * BATCH_SIZE, seed=1 + rank)
        return [
            collate(samples[at : at + BATCH_SIZE])
            for at in range(0, len(samples), BATCH_SIZE)
        ]

    def plan(self, segments: tuple[Segment, ...]) -> Plan:
        """Return a plan of these segments for the family's model."""
        recipe = Recipe(
            batch_size=BATCH_SIZE,
            gradient_accumulation_steps=self.accumulation,
            precision="bf16-mixed" if self.has("bf16") else "fp32",
            optimizer="adamw_torch",
            segments=segments,
        )
        model = self.model(Counter())
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        blocks = tuple(name for chain in self.family.chains for name in chain)
        widest = collate(self.family.samples(50)[:BATCH_SIZE])
        batch = {
            name: (tuple(each.shape), str(each.dtype).removeprefix("torch."))
            for name, each in widest.items()
        }
        return sample_plan(
            estimate=sample_estimate(recipe),
            model=sample_model(
                name=type(model).__name__,
                parameter_count=sum(size for size, _ in sizes),
                trainable_count=sum(size for size, trains in sizes if trains),
                blocks=blocks,
                block_type=type(model.get_submodule(blocks[0])).__name__,
                batch=batch,
            ),
            alternatives=(),
        )


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW as transformers' Trainer makes it: no weight decay."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)


def scheduler_for(
    optimizer: torch.optim.Optimizer, settings: Settings
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule: a warm-up and a cosine, or none."""
    if not settings.has("schedule"):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.updates),
        ],
        milestones=[5],
    )
