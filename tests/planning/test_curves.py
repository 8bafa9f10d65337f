"""What a plan's report shows around it: real choices, evaluated when asked for."""

import copy
import pickle
from pathlib import Path

import pytest
import torch

from budgetfit.core.budget import Budget
from budgetfit.core.plan import Plan
from budgetfit.core.plan_curves import PlanCurves
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.planner import make_plan
from budgetfit.planning.session import Request
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi
from tests.planning.test_lazy_alternatives import made

GPU = find_gpu("rtx-4090")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return made(Mebi(6))


def curves_of(plan: Plan) -> PlanCurves:
    assert plan.lazy_curves is not None
    return plan.lazy_curves()


def test_they_are_evaluated_once_and_survive_a_copy(plan: Plan) -> None:
    found = curves_of(plan)
    assert curves_of(plan.changed(warnings=("one more",))) is found
    assert curves_of(copy.deepcopy(plan)) == found
    assert curves_of(pickle.loads(pickle.dumps(plan))) == found


def test_a_saved_plan_is_without_them(plan: Plan) -> None:
    assert "lazy_curves" not in plan.to_json()
    assert Plan.from_json(plan.to_json()).lazy_curves is None


def test_the_categories_add_up_to_the_timeline_of_the_plan(plan: Plan) -> None:
    rows, line = curves_of(plan).category_bytes, plan.estimate.timeline
    assert [sum(row.values()) for row in rows] == [
        point.allocated_bytes for point in line.points
    ]
    assert rows[line.peak] == plan.estimate.at_peak_bytes


def test_no_point_of_the_front_is_beaten_by_another(plan: Plan) -> None:
    front = curves_of(plan).front
    assert len(front) > 2
    peaks = [point.peak_bytes for point in front]
    rates = [point.samples_per_s for point in front]
    assert peaks == sorted(set(peaks), reverse=True)
    assert rates == sorted(set(rates), reverse=True)


def test_no_practice_and_no_plan_is_above_the_front(plan: Plan) -> None:
    curves = curves_of(plan)
    fastest, lowest = curves.front[0], curves.front[-1]
    labels = [point.label for point in curves.practices]
    assert labels == [
        "no checkpointing",
        "every 2nd block recomputed",
        "every block recomputed",
    ]
    for point in (*curves.practices, curves.plan):
        assert point.samples_per_s <= fastest.samples_per_s * (1 + 1e-9)
        assert point.peak_bytes >= lowest.peak_bytes
        as_low = [row for row in curves.front if row.peak_bytes <= point.peak_bytes]
        assert point.samples_per_s <= as_low[0].samples_per_s * (1 + 1e-9)


def test_the_plan_is_among_the_batch_sizes_and_none_is_faster(plan: Plan) -> None:
    curves = curves_of(plan)
    rates = {point.batch_size: point.samples_per_s for point in curves.batch_sizes}
    assert list(rates) == sorted(rates)
    assert max(rates, key=lambda size: rates[size]) == plan.recipe.batch_size
    assert all(row.peak_bytes <= curves.limit_bytes for row in curves.batch_sizes)


def test_the_plan_has_its_own_numbers_and_the_spare_memory_of_the_replay(
    plan: Plan,
) -> None:
    curves, estimate = curves_of(plan), plan.estimate
    (same,) = [r for r in curves.batch_sizes if r.batch_size == plan.recipe.batch_size]
    for point in (curves.plan, same):
        assert point.peak_bytes == estimate.allocated_bytes
        assert point.samples_per_s == estimate.samples_per_s
        assert point.segments == plan.recipe.segments
    spare = curves.limit_bytes - estimate.allocated_bytes
    assert spare == plan.budget.usable_bytes - estimate.reserved_bytes


@pytest.mark.parametrize("checkpointing", ["auto", "full"])
def test_the_batch_sizes_divide_an_effective_one(checkpointing: str) -> None:
    workload = Workload(
        model=Mebi(3), batch=torch.zeros(2, 512, 512), gpu=GPU
    ).with_found_blocks()
    plan = make_plan(
        workload,
        Request(
            budget=Budget(total_bytes=200 * MIB, context_bytes=0, headroom_bytes=0),
            checkpointing=checkpointing,
        ),
        precisions=["fp32"],
        optimizer="adamw_torch_fused",
        effective_batch_size=12,
    )
    found = curves_of(plan).batch_sizes
    assert {row.batch_size * row.gradient_accumulation_steps for row in found} == {12}


def test_the_snapshot_is_of_the_plan_and_a_loaded_plan_has_none(
    plan: Plan, tmp_path: Path
) -> None:
    plan.dump_snapshot(tmp_path / "step.pickle")
    found = pickle.loads((tmp_path / "step.pickle").read_bytes())
    reserved = sum(each["total_size"] for each in found["segments"])
    assert reserved == plan.estimate.reserved_bytes
    loaded = Plan.from_json(plan.to_json())
    with pytest.raises(InputError, match=r"budgetfit plan \.\.\. --snapshot"):
        loaded.dump_snapshot(tmp_path / "other.pickle")
