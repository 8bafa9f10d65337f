"""batch_dims: what is per sample in a batch that does not show it."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import InputError, Recipe
from budgetfit.api.plan import compare, estimate_settings, layers
from budgetfit.core.samples.sample_dims import SampleDims
from tests.core.test_sample_dims import MISVOTING
from tests.models import alone, sgd

pytestmark = pytest.mark.usefixtures("kept_traces")
DIMS = {"x": 0}


class Prototypes(nn.Module):
    """Scores samples against a table that is handed in, whose rows have weights."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.first = nn.Linear(3, width)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, other: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return ((hidden @ table.T) * other).square().mean()


def planned(model: nn.Module, **asked: Any) -> budgetfit.Plan:
    asked = {"batch_dims": DIMS, "checkpointing": "full", "batch_size": 3} | asked
    made = budgetfit.plan(
        model, gpu="t4", batch=MISVOTING, precision="fp32", optimizer=sgd, **asked
    )
    return alone(made)


def trained(plan: budgetfit.Plan, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights after one update with the whole batch, cut by the plan."""
    with warnings.catch_warnings(), budgetfit.apply(plan, model, optimizer=sgd) as run:
        warnings.simplefilter("error")  # of a larger batch than planned
        for part in run.parts(MISVOTING):
            run.step(part)
        assert run.steps_done == 1
    return model.state_dict()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_batch_that_misvotes_trains_as_in_the_plain_loop(
    *, is_loaded: bool, tmp_path: Path
) -> None:
    model = Prototypes()
    plain = copy.deepcopy(model)
    plain(**MISVOTING).backward()
    sgd(plain.parameters()).step()
    plan = planned(model, effective_batch_size=6)
    if is_loaded:
        plan.save(tmp_path / "plan.json")
        plan = budgetfit.Plan.load(tmp_path / "plan.json")
    for name, weight in trained(plan, model).items():  # parts of 3 samples and of 1
        torch.testing.assert_close(weight, plain.state_dict()[name])


def test_a_plan_predicts_it_and_grows_with_its_samples() -> None:
    plan = planned(Prototypes())
    assert "One sample: x 3 float32, table 9x4 float32, other 9 float32" in str(plan)
    check = budgetfit.verify(plan, optimizer=sgd, device="cpu")
    assert check.passed
    assert check.allocated_error is not None
    assert abs(check.allocated_error) < 0.02


def test_estimates_and_comparisons_take_it_too() -> None:
    asked: dict[str, Any] = {"batch": MISVOTING, "batch_dims": DIMS}
    small, large = (
        budgetfit.estimate(
            Prototypes(),
            Recipe(batch_size=size, precision="fp32", optimizer="sgd"),
            gpu="t4",
            **asked,
        )
        for size in (4, 4096)
    )
    scores = 4092 * 9 * 4  # bytes
    assert large.allocated_bytes > small.allocated_bytes + scores
    as_it_is = budgetfit.estimate(Prototypes(), gpu="t4", **asked)
    assert as_it_is.recipe.batch_size == 4
    named, _ = estimate_settings(Prototypes(), gpu="t4", batch_size=4096, **asked)
    assert named.allocated_bytes > small.allocated_bytes + scores
    rows, summary = compare(Prototypes(), ["t4"], batch_size=3, **asked)
    assert rows[0].fits
    assert summary.batch_dims == SampleDims(0, DIMS)
    assert layers(Prototypes(), **asked)


def test_a_plan_file_without_it_is_read_as_before() -> None:
    model = nn.LSTM(4, 4)  # its inputs are [length, batch, features]
    batch = torch.zeros(5, 2, 4)
    plan = budgetfit.plan(
        model, gpu="t4", batch=batch, loss=lambda o, _: o[0].mean(), batch_size=1
    )
    document = json.loads(alone(plan).to_json())
    assert document["model"]["batch_dims"] == {"default": 1, "named": {}}
    del document["model"]["batch_dims"]
    old = budgetfit.Plan.from_json(json.dumps(document))
    with budgetfit.apply(old, model, loss=lambda o, _: o[0].mean()) as run:
        assert [part.shape for part in run.parts(batch)] == [(5, 1, 4)] * 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"default": 0, "named": {"y": 0}}, r"damaged at 'model\.batch_dims\.named'"),
        ({"default": 0, "named": {"x": -1}}, "below zero"),
        ({"default": 0, "named": {"x": True}}, "damaged"),
        ({"default": 0, "named": {}, "more": 1}, "damaged"),
    ],
)
def test_a_damaged_plan_file_is_refused(value: object, message: str) -> None:
    document = json.loads(planned(Prototypes()).to_json())
    document["model"]["batch_dims"] = value
    with pytest.raises(InputError, match=message):
        budgetfit.Plan.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("given", "message"),
    [({"y": 0}, "names 'y'"), (0, "different numbers"), ({"x": 2}, "dimension 2")],
)
def test_what_the_batch_is_not_is_refused_before_tracing(
    given: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        planned(Prototypes(), batch_dims=given)


class FirstInput(nn.Linear):
    """Looks at one of its inputs, and at none that seems to have samples."""

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


def test_an_estimate_of_which_nothing_grows_is_refused_as_a_plan_is() -> None:
    batch = (torch.zeros(7, 4), torch.zeros(2, 1), torch.zeros(2))

    def estimated(size: int, **asked: Any) -> budgetfit.Estimate:
        recipe = Recipe(batch_size=size, precision="fp32", optimizer="sgd")
        return budgetfit.estimate(
            FirstInput(4, 4), recipe, gpu="t4", batch=batch, **asked
        )

    with pytest.raises(
        InputError, match=r'same from any batch size.* 2 rows.*batch_dims=\{"0": 0\}'
    ) as refused:
        estimated(4)
    with pytest.raises(InputError) as of_plan:
        budgetfit.plan(FirstInput(4, 4), gpu="t4", batch=batch)
    assert str(of_plan.value) == str(refused.value)
    with pytest.raises(InputError, match="same from any batch size"):
        estimate_settings(FirstInput(4, 4), gpu="t4", batch=batch, batch_size=4)
    assert estimated(4, batch_dims={"0": 0}).recipe.batch_size == 4
    assert estimated(2).recipe.batch_size == 2  # as it was given


class Declared(Prototypes):
    """Brings its own example."""

    dummy_inputs = MISVOTING


def test_the_example_of_a_model_itself_is_resized_by_it() -> None:
    plan = budgetfit.plan(Declared(), gpu="t4", batch_size=3, batch_dims=DIMS)
    assert [shape for shape, _ in plan.model.batch.values()] == [(2, 3), (9, 4), (9,)]
    with pytest.raises(InputError, match="names 'y'"):
        budgetfit.plan(Declared(), gpu="t4", batch_dims={"y": 0})
