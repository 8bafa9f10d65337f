"""What other code sets between a block's forward and its backward.

The plain loop's gradients are those of the forward. So a recomputation has to find what
the forward found, also in steps that are not compared by values.
"""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from budgetfit.applying.checkpointing.apply_segments import apply_segments
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import RecomputationError
from tests.applying.run.test_forward_inputs import (
    TECHNIQUES,
    Tower,
    every_technique,
    in_a_row,
)
from tests.hazards.kinds import WIDTH, Block
from tests.models import seed

STEPS = 8
LATE = 7  # no step in which values are compared
settings = SimpleNamespace(scale=1.0)


class Scaled(Block):
    """Its scale is an attribute, of which only other code has another value."""

    def prepare(self) -> None:
        self.scale = 1.0

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale


class ScaledByGlobal(Block):
    def between(self, x: Tensor) -> Tensor:
        return x * settings.scale


class Dropping(Block):
    def prepare(self) -> None:
        self.dropout = nn.Dropout(0.1)

    def between(self, x: Tensor) -> Tensor:
        return self.dropout(x)


class Remembering(Block):
    """Reads a tensor that its parent replaces after all blocks have run."""

    def prepare(self) -> None:
        self.memory: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        return x if self.memory is None else torch.add(x, self.memory.mean())


class Biased(Block):
    def prepare(self) -> None:
        self.register_buffer("bias", torch.zeros(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("bias")


def sets_scale(tower: Any, x: Tensor, forwards: int) -> Tensor:
    y = in_a_row(tower, x, forwards)
    for block in tower.blocks:
        block.scale = 1.0 - forwards / 20
    return y


def sets_global(tower: Any, x: Tensor, forwards: int) -> Tensor:
    settings.scale = 0.5
    y = in_a_row(tower, x, forwards)
    settings.scale = 1.0
    return y


def sets_probability(tower: Any, x: Tensor, forwards: int) -> Tensor:
    y = in_a_row(tower, x, forwards)
    for block in tower.blocks:
        block.dropout.p = forwards / 20
    return y


def remembers(tower: Any, x: Tensor, forwards: int) -> Tensor:
    y = in_a_row(tower, x, forwards)
    for block in tower.blocks:
        block.memory = y.detach()
    return y


def always_writes_to_bias(tower: Any, x: Tensor, forwards: int) -> Tensor:
    """As the balancing of experts without an auxiliary loss does."""
    y = in_a_row(tower, x, forwards)
    for block in tower.blocks:
        block.bias.add_(0.1)
    return y


def _losses(
    kind: type[Block],
    call: Callable[[Any, Tensor, int], Tensor],
    segments: tuple[Segment, ...],
) -> list[float]:
    seed(0)
    recipe = Recipe(batch_size=4, precision="fp32", optimizer="sgd", segments=segments)
    with Run(Tower(kind, call), recipe, learning_rate=0.5) as run:
        return [run.step(torch.ones(4, WIDTH)).item() for _ in range(STEPS)]


@every_technique
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (Scaled, sets_scale),
        (ScaledByGlobal, sets_global),
        (Dropping, sets_probability),
        (Remembering, remembers),
        (Biased, always_writes_to_bias),
    ],
)
def test_a_recomputation_finds_what_the_forward_found(
    kind: type[Block],
    call: Callable[[Any, Tensor, int], Tensor],
    segments: tuple[Segment, ...],
) -> None:
    assert _losses(kind, call, segments) == _losses(kind, call, ())


def writes_to_bias(tower: Any, x: Tensor, forwards: int) -> Tensor:
    y = in_a_row(tower, x, forwards)
    if forwards >= LATE - 1:
        for block in tower.blocks:
            block.bias.add_(0.5)
    return y


@every_technique
def test_a_buffer_that_others_write_to_is_restored_from_the_second_time_on(
    segments: tuple[Segment, ...],
) -> None:
    """The first time there is no copy, which a warning says."""
    seed(0)
    tower: Any = Tower(Biased, writes_to_bias)
    x = torch.randn(4, WIDTH)
    undo = apply_segments(tower, segments)
    for step in range(1, LATE + 1):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss = tower(x)
            before = [block.bias.clone() for block in tower.blocks]
            found = torch.autograd.grad(loss, tower.blocks[0].inner.weight)
        words = [
            str(each.message) for each in said if "Biased.bias" in str(each.message)
        ]
        assert bool(words) == (step == LATE - 1), step
        assert all(
            torch.equal(block.bias, each)
            for block, each in zip(tower.blocks, before, strict=True)
        )
    undo()
    for block in tower.blocks:
        block.bias.sub_(0.5)  # as the last forward found it
    tower.forwards = 0
    (expected,) = torch.autograd.grad(tower(x), tower.blocks[0].inner.weight)
    torch.testing.assert_close(found[0], expected)


@every_technique
def test_weights_that_are_written_to_before_backward_are_refused_in_any_step(
    segments: tuple[Segment, ...],
) -> None:
    """As by an optimizer step between two backward passes; torch refuses it, too."""
    seed(0)
    tower: Any = Tower(Block, in_a_row)
    x = torch.ones(4, WIDTH)
    apply_segments(tower, segments)
    for _ in range(LATE - 1):
        tower(x).backward()
    loss = tower(x)
    with torch.no_grad():
        tower.blocks[1].outer.bias.add_(0.1)
    with pytest.raises(RecomputationError, match=r"'outer.bias' was written to in pla"):
        loss.backward()


class Renormed(Block):
    """Its forward writes to its weights, each time the same."""

    def prepare(self) -> None:
        self.embedding = nn.Embedding(4, WIDTH, max_norm=0.5)

    def between(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(4))


def twice(tower: Any, x: Tensor, forwards: int) -> Tensor:
    return in_a_row(tower, in_a_row(tower, x, forwards), forwards)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_weights_that_a_forward_writes_to_may_be_written_to_again(
    technique: str,
) -> None:
    found = _losses(Renormed, twice, TECHNIQUES[technique])
    assert found == _losses(Renormed, twice, ())
