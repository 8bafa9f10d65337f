"""On a CUDA device: a plan near its limit holds, trains, and was predicted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import budgetfit
from budgetfit import Plan, Verification
from tests.accuracy.case import CARDS, Case
from tests.accuracy.cases import CASES
from tests.accuracy.predict import compare
from tests.accuracy.well_formed import NULL_DEVICE_NAME, faults

ALLOCATED_WITHIN = 0.01
RESERVED_WITHIN = 0.03
LIMIT = "4GB"  # every block of GPT-2 kept: one sample of 1024 tokens, or two

HERE = torch.cuda.is_available()
NAME = torch.cuda.get_device_name() if HERE else ""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs a CUDA device, and there is none"),
]
computes = pytest.mark.skipif(
    NAME == NULL_DEVICE_NAME, reason="needs a CUDA device that computes"
)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(use_cache=False)).train()


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan for the card of this machine, as if it had 4 GB."""
    return budgetfit.plan(gpt2(), vram=LIMIT, effective_batch_size=8)


@pytest.fixture(scope="module")
def check(plan: Plan) -> Verification:
    return budgetfit.verify(plan)


def test_the_plan_is_for_this_card_and_near_its_limit(plan: Plan) -> None:
    capability = torch.cuda.get_device_capability()
    assert plan.gpu.compute_capability == capability
    assert plan.budget.total_bytes == 4 * 10**9
    assert plan.recipe.effective_batch_size == 8
    assert plan.fits
    assert plan.estimate.reserved_bytes >= 0.8 * plan.budget.usable_bytes


def test_it_does_not_run_out_of_memory(plan: Plan, check: Verification) -> None:
    assert check.out_of_memory is None
    assert check.device == "cuda"
    assert check.device_name == NAME
    assert check.steps == 3
    measured = max(row.measured_reserved_bytes for row in check.phases)
    assert measured <= plan.budget.usable_bytes


def test_the_allocated_peak_was_predicted_within_one_percent(
    check: Verification,
) -> None:
    assert check.allocated_error is not None
    assert abs(check.allocated_error) <= ALLOCATED_WITHIN, str(check)


def test_the_reserved_peak_was_predicted_within_three_percent(
    check: Verification,
) -> None:
    predicted = max(row.predicted_reserved_bytes for row in check.phases)
    measured = max(row.measured_reserved_bytes for row in check.phases)
    assert abs(predicted / measured - 1) <= RESERVED_WITHIN, str(check)


def test_the_memory_of_the_whole_process_is_known(
    plan: Plan, check: Verification
) -> None:
    assert check.predicted_process_bytes == plan.estimate.process_bytes
    assert check.measured_process_bytes is not None
    reserved = max(row.measured_reserved_bytes for row in check.phases)
    assert check.measured_process_bytes >= reserved


@computes
def test_gradients_and_recomputation_are_as_planned(
    plan: Plan, check: Verification
) -> None:
    assert check.gradients_match, str(check)
    assert check.recomputed_blocks == len(plan.recipe.wrapped_blocks)
    assert check.passed, str(check)


@computes
def test_the_plan_trains_three_steps(plan: Plan) -> None:
    model = gpt2().cuda()
    size = plan.recipe.batch_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50257, (size, 1024), generator=generator)
    batch = {"input_ids": ids, "labels": ids}

    before = model.lm_head.weight.detach().clone()
    with budgetfit.apply(plan, model) as run:
        losses = [
            run.step(batch, max_grad_norm=1.0).item()
            for _ in range(3 * plan.recipe.gradient_accumulation_steps)
        ]

    assert all(torch.isfinite(torch.tensor(losses)))
    assert next(model.parameters()).is_cuda
    if run.scaler is None:  # one may skip its first steps while it looks for a scale
        assert not model.lm_head.weight.equal(before)


def test_too_small_a_limit_is_told_and_not_tried() -> None:
    with pytest.raises(budgetfit.DoesNotFitError, match="whatever is recomputed"):
        budgetfit.plan(gpt2(), vram="2GB")


def recordable() -> list[Case]:
    """Return a few cases of this card: one of each way to checkpoint."""
    names = [
        gpu
        for gpu, card in CARDS.items()
        if card.title == NAME
        or (NAME == NULL_DEVICE_NAME and os.environ.get("NULLCUDA_GPU") == card.gpu)
    ]
    small = [
        case
        for case in CASES.values()
        if case.gpu in names and case.family == "gpt2-124m" and not case.allocator
    ]
    found = {(case.checkpointing, case.precision): case for case in small}
    return [
        found[key]
        for key in (("keep", "fp32"), ("recompute", "fp16-mixed"))
        if key in found
    ]


def test_recorded_cases_of_this_card_can_be_recorded_and_are_predicted(
    tmp_path: Path,
) -> None:
    cases = recordable()
    if not cases:
        pytest.skip(f"no case is recorded for the card {NAME!r}")
    root = Path(__file__).parents[2]
    for case in cases:
        subprocess.run(
            [
                *(sys.executable, "-m", "tests.accuracy.measure", case.name),
                *("--cudnn", "off", "--out", str(tmp_path)),
            ],
            cwd=root,
            env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": case.allocator},
            check=True,
        )
        (path,) = tmp_path.rglob(f"{case.name}.json")
        recording = json.loads(path.read_text())
        assert faults(recording) == []
        found = compare(case, recording)
        assert abs(found.allocated_error) <= ALLOCATED_WITHIN, case.name
        assert abs(found.reserved_error) <= RESERVED_WITHIN, case.name
