"""Short trainings for the tests of Run: a model with dropout, batches, losses."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from tests.applying.small_models import batch_for, make

PAIRS = (Segment(("layers.0", "layers.1")), Segment(("layers.3",)))


def recipe(batch_size: int = 4, steps: int = 1, **options: Any) -> Recipe:
    """Return a recipe for the stack."""
    return Recipe(
        batch_size=batch_size,
        gradient_accumulation_steps=steps,
        **{"optimizer": "adamw_torch", **options},
    )


def start(settings: Recipe | None = None, **options: Any) -> Run:
    """Return a run of the stack, which has dropout, from always the same weights."""
    run = Run(
        make("stack"), settings or recipe(segments=PAIRS), learning_rate=0.01, **options
    )
    torch.manual_seed(5)
    return run


def without_dropout(run: Run) -> Run:
    """Make a run draw nothing, so that the cut of a batch does not matter."""
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):  # transformers' functional ones
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return run


def batches(count: int, samples: int = 4) -> list[dict[str, torch.Tensor]]:
    """Return different batches, without drawing from the global generator."""
    whole = batch_for("stack", samples * count)
    return [
        {name: item[at : at + samples] for name, item in whole.items()}
        for at in range(0, samples * count, samples)
    ]


def losses(run: Run, data: list[dict[str, torch.Tensor]]) -> list[float]:
    """Train on each batch once."""
    return [run.step(batch).item() for batch in data]


def weights(run: Run) -> Iterator[torch.Tensor]:
    """Yield all parameters."""
    yield from run.model.parameters()


def assert_same(one: Run, other: Run, tolerance: float | None = None) -> None:
    """Fail unless the weights are the same: to the bit, or relative to their norm."""
    for (name, a), b in zip(one.model.named_parameters(), weights(other), strict=True):
        if tolerance is None:
            assert torch.equal(a, b), name
        else:
            assert (a - b).norm() <= tolerance * b.norm(), name
