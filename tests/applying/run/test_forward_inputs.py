"""Hooks, arguments and parameters of a block that runs again in backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import RecomputationError
from tests.hazards.kinds import WIDTH, Block
from tests.models import seed

NAMES = tuple(f"blocks.{number}" for number in range(3))
TECHNIQUES = {
    "each block": tuple(Segment((name,)) for name in NAMES),
    "one segment": (Segment(NAMES),),
    "nested": (Segment(NAMES, nested=True),),
    "selective": tuple(
        Segment((name,), mode="selective", saved_ops=("aten.addmm.default:0",))
        for name in NAMES
    ),
}
every_technique = pytest.mark.parametrize(
    "segments", TECHNIQUES.values(), ids=list(TECHNIQUES)
)


class Tower(nn.Module):
    """Blocks whose parent calls each in its own way."""

    def __init__(
        self, kind: type[Block], call: Callable[[Any, Tensor, int], Tensor]
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in NAMES)
        self.call = call
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.call(self, x, self.forwards).square().mean()


def in_a_row(tower: Tower, x: Tensor, _: int) -> Tensor:
    for block in tower.blocks:
        x = block(x)
    return x


class HookedParameter(Block):
    def between(self, x: Tensor) -> Tensor:
        self.inner.weight.register_hook(lambda gradient: gradient * 0.5)
        return x


class HookedOnce(Block):
    def between(self, x: Tensor) -> Tensor:
        if not hasattr(self, "hook"):
            self.hook = self.inner.weight.register_hook(lambda gradient: -gradient)
        return x


class HookedInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


@every_technique
@pytest.mark.parametrize("kind", [HookedParameter, HookedOnce, HookedInput])
def test_hooks_that_a_forward_registers_act_once(
    kind: type[Block], segments: tuple[Segment, ...]
) -> None:
    def losses(planned: tuple[Segment, ...]) -> list[float]:
        seed(0)
        model = Tower(kind, in_a_row)
        recipe = Recipe(
            batch_size=4, precision="fp32", optimizer="sgd", segments=planned
        )
        with Run(model, recipe, learning_rate=0.5) as run:
            return [run.step(torch.ones(4, WIDTH)).item() for _ in range(3)]

    assert losses(segments) == losses(())


class Masked(Block):
    def forward(self, x: Tensor, masks: Any = None) -> Tensor:
        mask = masks[0] if isinstance(masks, list) else masks
        return x + self.outer(torch.tanh(self.inner(x)) * mask.detach().clone())


def with_one_mask(tower: Tower, x: Tensor, forwards: int) -> Tensor:
    mask = torch.ones(WIDTH)
    for block in tower.blocks:
        x = block(x, masks=mask)
        if forwards == 7:  # where values are not compared
            mask.mul_(0.5)
    return x


def with_a_list_of_masks(tower: Tower, x: Tensor, forwards: int) -> Tensor:
    masks = [torch.ones(WIDTH)]
    for block in tower.blocks:
        x = block(x=x, masks=masks)
        if forwards == 7:
            masks[0].mul_(0.5)
    return x


@every_technique
@pytest.mark.parametrize("call", [with_one_mask, with_a_list_of_masks])
def test_arguments_that_are_written_to_are_refused_in_any_step(
    call: Callable[[Any, Tensor, int], Tensor], segments: tuple[Segment, ...]
) -> None:
    seed(0)
    recipe = Recipe(batch_size=4, precision="fp32", optimizer="sgd", segments=segments)
    with Run(Tower(Masked, call), recipe) as run:
        for _ in range(6):
            run.step(torch.ones(4, WIDTH))
        with pytest.raises(RecomputationError, match=r"shape \[8\], was written to"):
            run.step(torch.ones(4, WIDTH))


def with_other_weights(tower: Tower, x: Tensor, _: int) -> Tensor:
    for block in tower.blocks:
        others = {name: each * 1.001 for name, each in block.named_parameters()}
        x = torch.func.functional_call(block, others, (x,))
    return x


@every_technique
def test_other_parameters_are_refused_where_they_differ_by_rounding_of_bf16(
    segments: tuple[Segment, ...],
) -> None:
    seed(0)
    recipe = Recipe(
        batch_size=4, precision="bf16-mixed", optimizer="sgd", segments=segments
    )
    with (
        Run(Tower(Block, with_other_weights), recipe) as run,
        pytest.raises(RecomputationError, match=r"functional_call"),
    ):
        run.step(torch.ones(4, WIDTH))
