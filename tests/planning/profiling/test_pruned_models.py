"""Pruning masks are buffers, and the masked weights activations of every step."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from budgetfit.applying.meta_copy import copy_to_meta
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.tracing.recording.step_tracer import trace_step
from tests.models import MIB, Mebi, mean, without_loss
from tests.planning.profiling.test_real_cpu_step import measured, predicted

BATCH = torch.zeros(2, 512, 512)


def pruned() -> Mebi:
    """Three weights of 1 MiB, each with a mask as large."""
    model = Mebi()
    for block in model.blocks:
        prune.l1_unstructured(block.inner, "weight", amount=0.5)
    return model


@pytest.mark.parametrize(
    "segments", [(), checkpoint_every_block(("blocks.0", "blocks.1", "blocks.2"))]
)
def test_live_bytes_of_a_pruned_model_are_those_of_a_real_step(
    segments: tuple[Segment, ...],
) -> None:
    recipe = Recipe(batch_size=2, segments=segments)
    raw = trace_step(
        pruned(),
        lambda model, on_phase: Run(
            model, recipe, on_phase=on_phase, on_missing_loss=without_loss
        ),
        BATCH,
        batch_size=2,
        blocks=("blocks.0", "blocks.1", "blocks.2"),
        target=None,
    )
    masks = CATEGORIES.index("buffers")
    kinds = zip(raw.log.sizes, raw.log.categories, strict=True)
    assert sum(size for size, kind in kinds if kind == masks) == 3 * MIB
    assert predicted(raw) == measured(pruned(), BATCH, recipe, mean, steps=1)


def test_a_pruned_model_can_be_copied_without_its_weights() -> None:
    model = pruned()
    copied = copy_to_meta(model, frozen=True)
    assert all(p.is_meta and not p.requires_grad for p in copied.parameters())
    assert {n: p.shape for n, p in copied.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert not any(p.is_meta for p in model.parameters())


def test_a_copy_keeps_ties_and_takes_replacements() -> None:
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    copied: Any = copy_to_meta(nn.Sequential(first, second, nn.ReLU()))
    assert copied[0].weight is copied[1].weight
    other: Any = copy_to_meta(
        nn.Sequential(first, nn.ReLU()),
        replace=lambda module: nn.Tanh() if isinstance(module, nn.ReLU) else None,
    )
    assert isinstance(other[1], nn.Tanh)
    whole = copy_to_meta(nn.ReLU(), replace=lambda _: nn.Tanh())
    assert isinstance(whole, nn.Tanh)
