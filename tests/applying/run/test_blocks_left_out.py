"""Models that leave blocks out at random: layerdrop, stochastic depth.

Training goes on, gradients are the unmodified model's, and a block that did not run is
not missed where recomputed blocks are counted.
"""

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import budgetfit
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from tests.models import mean, seed, squares

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand([]).item(),
    "python": lambda: random.uniform(0, 1),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002, PLW0108 - found when called
}
BATCH = torch.linspace(-1, 1, 64).view(4, 16)
NAMES = tuple(f"blocks.{number}" for number in range(4))
SEGMENTS = {
    "each": tuple(Segment((name,)) for name in NAMES),
    "pairs": (Segment(NAMES[:2]), Segment(NAMES[2:])),
    "all": (Segment(NAMES),),
    "nested": (Segment(NAMES, nested=True),),
    "offload": tuple(Segment((name,), mode="offload") for name in NAMES),
    "selective": tuple(
        Segment((name,), mode="selective", saved_ops=("aten.addmm.default:0",))
        for name in NAMES
    ),
    "inputs on the host": (Segment(NAMES, input_on_host=True),),
}


class LayerDrop(nn.Module):
    """A chain, or residual blocks, each left out with a chance of ``p``."""

    def __init__(
        self,
        draw: str = "torch",
        p: float = 0.5,
        added: bool = False,
        keeps: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for _ in NAMES
        )
        self.head = nn.Linear(16, 4)
        self.draw, self.p, self.added, self.keeps = draw, p, added, keeps

    def left_out(self) -> bool:
        """Compare with the chance of leaving a block out, or of keeping it."""
        number = DRAWS[self.draw]()
        return number > 1 - self.p if self.keeps else number < self.p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.training and self.left_out():
                continue
            x = block(x) + x if self.added else block(x)
        result: torch.Tensor = self.head(x)
        return result


class StochasticDepth(LayerDrop):
    """Leaves blocks out sample by sample, after they ran."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            keeps = torch.rand(x.shape[0], 1, device=x.device) > self.p
            x = x + block(x) * keeps
        result: torch.Tensor = self.head(x)
        return result


def planned(model: nn.Module, checkpointing: str) -> budgetfit.Plan:
    return budgetfit.plan(
        model,
        gpu="t4",
        batch=BATCH,
        loss=squares,
        batch_size=4,
        checkpointing=checkpointing,
        precision="fp32",
    )


def trained(
    model: nn.Module, segments: tuple[Segment, ...], number: int
) -> dict[str, torch.Tensor]:
    """Return the weights after a step in which chance has its way."""
    model = copy.deepcopy(model)
    recipe = Recipe(batch_size=4, segments=segments, optimizer="sgd")
    with Run(model, recipe, loss=squares, learning_rate=1.0) as run:
        seed(number)
        run.step(BATCH)
    return model.state_dict()


@pytest.mark.parametrize("how", SEGMENTS)
@pytest.mark.parametrize(
    "model", [LayerDrop(), LayerDrop(added=True), StochasticDepth()]
)
def test_steps_are_the_plain_models_whatever_is_left_out(
    model: LayerDrop, how: str
) -> None:
    for number in range(8):
        plain = trained(model, (), number)
        as_planned = trained(model, SEGMENTS[how], number)
        for name, weight in plain.items():
            torch.testing.assert_close(as_planned[name], weight)


@pytest.mark.parametrize(
    ("draw", "keeps"), [("torch", False), ("python", True), ("numpy", False)]
)
def test_a_plan_is_for_all_blocks_whatever_is_drawn(draw: str, keeps: bool) -> None:
    plans = []
    for number in range(3):
        seed(number)
        plans.append(
            planned(LayerDrop(draw, p=0.9 * (number > 0), keeps=keeps), "full")
        )
    assert all(plan.model.blocks == NAMES for plan in plans)
    assert {plan.estimate.allocated_bytes for plan in plans} == {
        plans[0].estimate.allocated_bytes
    }


@pytest.mark.parametrize(
    ("p", "keeps", "frozen"),
    [(0.5, False, False), (0.5, True, True), (0.9, False, True), (0.9, True, False)],
)
def test_what_was_left_out_is_not_missed(p: float, keeps: bool, frozen: bool) -> None:
    model = LayerDrop(p=p, added=True, keeps=keeps)
    if frozen:  # then no missing gradient tells that it did not run
        model.blocks[1:].requires_grad_(requires_grad=False)
    plan = planned(model, "full")
    check = budgetfit.verify(plan, device="cpu")
    assert check.expected_recomputed_blocks == len(plan.recipe.segments) == len(NAMES)
    assert check.recomputed_blocks == check.expected_recomputed_blocks
    assert check.gradients_match


def test_bart_trains_with_layerdrop() -> None:
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        encoder_layerdrop=0.5,
        decoder_layerdrop=0.5,
        use_cache=False,
    )
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    config.decoder_start_token_id = config.forced_eos_token_id = 2
    model = transformers.BartModel(config).train()
    plan = budgetfit.plan(
        model, gpu="t4", batch_size=2, checkpointing="full", precision="fp32", loss=mean
    )
    ids = torch.arange(3, 35).repeat(2, 1)
    with budgetfit.apply(plan) as run:
        for number in range(6):
            seed(number)
            run.step({"input_ids": ids})
    check = budgetfit.verify(plan, device="cpu")

    assert len(plan.model.blocks) == len(plan.recipe.segments) == 6
    assert check.recomputed_blocks == check.expected_recomputed_blocks == 6
    assert check.gradients_match


def test_what_ran_and_does_not_train_is_still_told() -> None:
    class Cut(LayerDrop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[1:]:
                x = block(x)
            result: torch.Tensor = self.head(x.detach())
            return result

    plan = planned(Cut(), "none")
    with (
        budgetfit.apply(plan) as run,
        pytest.warns(UserWarning, match=r"16 of 18 .* blocks\.0\.0\.weight"),
    ):
        run.step(BATCH)
