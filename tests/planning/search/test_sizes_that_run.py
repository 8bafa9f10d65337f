"""Models that take some batch sizes only: the others are not planned nor suggested."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetfit
from budgetfit import DoesNotFitError, Plan, TraceError
from budgetfit.api.compare import compare
from budgetfit.traces import tracer
from tests.models import Chain

pytestmark = pytest.mark.usefixtures("kept_traces")
LENGTH, WIDTH = 2048, 256  # a sample has 2 MiB


class Blocks(Chain):
    """Some blocks, for a batch of any size."""

    def __init__(self) -> None:
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        super().__init__(*blocks)


class Several(Blocks):
    """Batch norm takes no mean of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.norm(x.mean(1))[:, None]


class Pairs(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        return super().forward(first + second)


class Fours(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 4, LENGTH, WIDTH).mean(1))


class One(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 1, "one sample only"
        return super().forward(x)


class Nothing(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"no size will do, not {len(x)}")


def plan(model: nn.Module, samples: int = 4, **arguments: Any) -> Plan:
    given: dict[str, Any] = {"gpu": "rtx-4090", "vram": 10**9, "precision": "fp32"}
    batch = torch.zeros(samples, LENGTH, WIDTH)
    return budgetfit.plan(
        model, batch=batch, loss=lambda out, _: out.sum(), **{**given, **arguments}
    )


@pytest.mark.parametrize("model", [Several, Pairs])
def test_the_lowest_memory_is_that_of_the_smallest_size_that_runs(
    model: type[Blocks],
) -> None:
    assert plan(model(), objective="memory").recipe.batch_size == 2


@pytest.mark.parametrize("model", [Several, Pairs])
def test_a_refusal_suggests_the_largest_size_that_runs(model: type[Blocks]) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan(model(), batch_size=500)
    assert caught.value.batch_bytes == 500 * LENGTH * WIDTH * 4
    sizes = [each.arguments.get("batch_size") for each in caught.value.suggestions]
    largest = plan(model(), objective="batch_size").recipe.batch_size
    assert sizes[0] == largest > 2
    assert plan(model(), batch_size=largest).estimate.fits


@pytest.mark.parametrize("asked", [{}, {"objective": "batch_size"}], ids=str)
def test_sizes_that_the_model_does_not_take_are_left_out(asked: dict[str, Any]) -> None:
    found = plan(Pairs(), **asked)
    assert found.recipe.batch_size % 2 == 0
    assert found.recipe.batch_size > 8


def test_progress_says_how_long_a_slow_trace_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", "off")
    monkeypatch.setattr(tracer, "SLOW_SECONDS", 0.0)
    said: list[str] = []
    plan(Blocks(), batch_size=2, progress=said.append)
    traced = [text for text in said if text.startswith("tracing batch")]
    assert "the last one took" not in traced[0]
    assert "the last one took 0 s: samples of fewer tokens" in traced[-1]


def test_a_given_size_needs_no_other_that_runs() -> None:
    found = plan(One(), samples=1, batch_size=1)
    assert found.recipe.batch_size == 1
    estimate = budgetfit.estimate(
        One(),
        found.recipe,
        gpu="rtx-4090",
        batch=torch.zeros(1, LENGTH, WIDTH),
        loss=lambda out, _: out.sum(),
    )
    assert estimate.reserved_bytes == found.estimate.reserved_bytes


def test_without_a_size_the_examples_is_planned_for_and_a_warning_says_so() -> None:
    found = plan(Fours(), samples=8)
    assert found.recipe.batch_size == 8
    assert any("8 samples" in text for text in found.warnings)


def test_a_comparison_plans_for_the_examples_size_too() -> None:
    rows, _ = compare(
        Fours(),
        ["rtx-4090", "t4"],
        batch=torch.zeros(8, LENGTH, WIDTH),
        loss=lambda out, _: out.sum(),
        precision="fp32",
    )
    for row in rows:
        assert row.estimate is not None
        assert row.estimate.recipe.batch_size == 8
        assert any("8 samples" in text for text in row.warnings)


def test_what_runs_at_no_size_is_still_refused_with_its_own_error() -> None:
    with pytest.raises(TraceError, match="no size will do"):
        plan(Nothing())
    with pytest.raises(TraceError, match="more than 1 value"):
        plan(Several(), batch_size=1)
