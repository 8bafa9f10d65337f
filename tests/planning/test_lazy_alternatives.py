"""A plan's alternatives wait until somebody looks; they are the planned model's."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from budgetfit.core.budget import Budget
from budgetfit.core.plan import Plan
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.planner import make_plan
from budgetfit.planning.session import Request
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi

pytestmark = pytest.mark.usefixtures("kept_traces")
ADA = find_gpu("rtx-4090")
LABELS = [
    "accumulating",
    "everything kept",
    "every block recomputed",
    "Chen's sqrt(n) segments",
    "largest batch",
    "lowest memory",
]


def made(
    model: nn.Module,
    loss: Callable[..., torch.Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    workload = Workload(
        model=model, batch=torch.zeros(2, 512, 512), gpu=ADA, loss=loss
    ).with_found_blocks()
    return make_plan(
        workload,
        Request(
            budget=Budget(total_bytes=200 * MIB, context_bytes=0, headroom_bytes=0)
        ),
        precisions=["fp32"],
        optimizer="adamw_torch_fused",
        progress=progress,
    )


def labels(plan: Plan) -> list[str]:
    return [row.label for row in plan.alternatives]


def test_only_what_decides_is_judged_before_somebody_looks() -> None:
    said: list[str] = []
    plan = made(Mebi(6), progress=said.append)
    assert [row.label for row in plan.judged_alternatives] == LABELS[:3]
    assert "judging the alternatives" not in said
    assert labels(plan)[:6] == LABELS
    assert "judging the alternatives" in said
    assert plan.judged_alternatives == plan.alternatives


def test_they_are_worked_out_once_for_a_plan_and_its_changed_copies() -> None:
    said: list[str] = []
    plan = made(Mebi(6), progress=said.append)
    other = plan.changed(warnings=("one more",))
    assert other.alternatives == plan.alternatives
    assert said.count("judging the alternatives") == 1
    assert other.warnings == ("one more",)


def test_they_are_those_of_the_model_as_it_was_planned() -> None:
    model = Mebi(6)
    plan, same = made(model), made(Mebi(6))
    model.blocks = model.blocks[:2]
    model.half()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert plan.alternatives == same.alternatives


def test_what_is_switched_on_when_somebody_looks_does_not_matter() -> None:
    plan, same = made(Mebi(6)), made(Mebi(6))
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        rows = plan.alternatives
    assert rows == same.alternatives


def test_a_loss_with_modules_has_them_worked_out_at_once() -> None:
    teacher = nn.Linear(512, 512)

    def loss(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (outputs - teacher(batch)).square().mean()

    said: list[str] = []
    plan = made(Mebi(6), loss, said.append)
    assert "judging the alternatives" in said
    assert labels(plan)[:6] == LABELS


@pytest.mark.parametrize(
    "through",
    [
        pytest.param(lambda plan: Plan.from_json(plan.to_json()), id="json"),
        pytest.param(lambda plan: pickle.loads(pickle.dumps(plan)), id="pickle"),
        copy.deepcopy,
        copy.copy,
    ],
)
def test_what_leaves_the_process_has_them(through: Callable[[Plan], Plan]) -> None:
    plan = made(Mebi(6))
    copied = through(plan)
    assert copied == plan
    assert labels(copied)[:6] == LABELS


def test_a_missing_attribute_is_still_an_error() -> None:
    with pytest.raises(AttributeError, match="'Plan' has no attribute 'alternative'"):
        _ = made(Mebi(6)).alternative


def test_no_row_that_came_later_beats_the_plan() -> None:
    plan = made(Mebi(6))
    ours = plan.estimate.samples_per_s
    for row in plan.alternatives:
        if row.fits and not row.is_suggestion:
            assert row.estimate.samples_per_s <= ours, row.label
