"""Blocks that write to their input are kept: they cannot run again."""

import pytest
import torch
from torch import Tensor, nn

import budgetfit
from budgetfit.tracing.recording.inplace_inputs import blocks_mutating_inputs
from tests.models import Chain


class Adds(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += self.inner(x.clone())
        return x


class Tower(Chain):
    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__(*(kind() for kind in kinds))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1)


class Plain(Adds):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def test_cells_that_overwrite_their_input_are_left_out_and_the_plan_says_so() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)
    )
    plan = budgetfit.plan(model, gpu="rtx-4090", batch_size=2)
    assert plan.model.blocks == ("0", "2")
    note = "2 of 4 blocks change their input in place and are always kept"
    assert note in plan.warnings


def test_a_model_of_such_blocks_alone_is_planned_without_recomputing() -> None:
    plan = budgetfit.plan(
        Tower(Adds, Adds), gpu="rtx-4090", batch_size=2, batch=torch.zeros(2, 8)
    )
    assert plan.model.blocks == plan.recipe.segments == ()


def written_to(model: nn.Module, *blocks: int) -> set[str]:
    """Return the names of the blocks whose inputs are overwritten."""
    names = [f"blocks.{number}" for number in blocks]
    return blocks_mutating_inputs(model, torch.zeros(2, 8), names, lambda m, x: m(x))


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ((Plain, Plain), set()),
        ((Adds, Plain), {"blocks.0"}),
        ((Plain, Adds, Plain), {"blocks.1"}),
    ],
)
def test_inputs_written_to_are_found(
    kinds: tuple[type[nn.Module], ...], found: set[str]
) -> None:
    assert written_to(Tower(*kinds), *range(len(kinds))) == found


def test_an_input_that_is_overwritten_after_its_block_ran_is_found_as_well() -> None:
    class Later(Tower):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            out = self.blocks[0](x)
            x += 1
            return self.blocks[1](out) + x

    assert written_to(Later(Plain, Plain), 0, 1) == {"blocks.0"}


def test_a_forward_that_fails_tells_what_was_seen_until_then() -> None:
    class Fails(Tower):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ValueError

    assert written_to(Fails(Adds, Plain), 0) == {"blocks.0"}


def test_blocks_that_do_not_run_or_run_twice_are_kept_and_said() -> None:
    class Some(Tower):
        def forward(self, x: Tensor) -> Tensor:
            for number in (0, 1, 1):
                x = self.blocks[number](x)
            return x

    plan = budgetfit.plan(
        Some(Plain, Plain, Plain, Plain),
        gpu="rtx-4090",
        batch_size=2,
        batch=torch.zeros(2, 8),
    )
    assert plan.model.blocks == ("blocks.0",)
    assert (
        "3 of 4 blocks do not run exactly once per forward, or inside of torch.func: "
        "they are always kept, and what those that do not run would keep is not in the "
        "prediction"
    ) in plan.warnings
