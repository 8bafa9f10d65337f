import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from budgetfit.applying.out_of_memory.error import (
    FailedStep,
    TrainingOutOfMemoryError,
    out_of_memory_error,
)
from budgetfit.applying.out_of_memory.expected_batch import LargerTensor
from budgetfit.core.allocator.out_of_memory_message import is_out_of_memory
from budgetfit.core.plan import Plan
from budgetfit.errors import BudgetfitError
from tests.reporting.sample_plans import sample_plan, sample_recipe

CPU = torch.device("cpu")
LONG = LargerTensor("input_ids", (6, 4096), (6, 2048))


REPORT = """\
Out of memory in the backward of model.layers.3.mlp, micro-batch 3 of 11: \
tried to allocate 1.50 GiB.
  predicted  20.00 GiB allocated, 22.00 GiB reserved at most, 23.00 GiB usable
  measured   19.00 GiB allocated, 20.00 GiB reserved
  the card   24.00 GiB, 512 MiB of it free
Likely: other processes hold about 3.00 GiB of the card, which the plan counted on; \
nvidia-smi names them.
Weights, optimizer, scaler and random state are as before this update; this \
micro-batch has not been trained on. The 2 before it in this update went with it: \
hand them in again.
Should fit: batch_size 6 x gradient_accumulation_steps 11, 24 blocks recomputed, \
12.00 GiB reserved. To go on with it:
  run.adopt(error.recipe)
  for part in run.parts(batch): run.step(part)
"""


def cuda_text(
    requested: str = "1.50 GiB",
    free: str = "512.00 MiB",
    allocated: str = "19.00 GiB",
    idle: str = "1.00 GiB",
    total: str = "24.00 GiB",
) -> str:
    """Return what torch 2.13 writes where the driver does not name processes."""
    return (
        f"CUDA out of memory. Tried to allocate {requested}. GPU 0 has a total "
        f"capacity of {total} of which {free} is free. Of the allocated memory "
        f"{allocated} is allocated by PyTorch, and {idle} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def failed(**changes: Any) -> FailedStep:
    values: dict[str, Any] = {
        "phase": "backward",
        "micro_batch": 1,
        "recipe": sample_recipe(),
        "module": "model.layers.3.mlp",
        **changes,
    }
    return FailedStep(**values)


def report(
    text: str | None = None, plan: Plan | None = None, **changes: object
) -> TrainingOutOfMemoryError:
    error = torch.OutOfMemoryError(cuda_text() if text is None else text)
    return out_of_memory_error(error, failed(**changes), device=CPU, plan=plan)


def test_it_is_caught_as_torchs_error_and_as_ours() -> None:
    error = report()
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, BudgetfitError)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.recipe == error.recipe
    assert again.card == error.card


def test_the_report_says_what_was_predicted_and_measured_and_what_to_do() -> None:
    error = report(plan=sample_plan(), micro_batch=3)
    assert f"{error}\n" == REPORT
    assert error.recipe == sample_plan().alternatives[0].estimate.recipe
    assert error.dropped_micro_batches == 2
    assert error.original.startswith("CUDA out of memory. Tried to allocate 1.50 GiB.")


def test_one_rank_of_several_does_not_go_on_alone() -> None:
    lines = str(report(plan=sample_plan(), ranks=4)).splitlines()
    assert not any("adopt" in line for line in lines)
    assert lines[-2].startswith("The other 3 of 4 ranks wait for this one: start all")
    assert lines[-1].endswith("plan(..., batch_size=6)")


def test_a_batch_longer_than_planned_is_the_first_reason() -> None:
    error = report(plan=sample_plan(), larger=(LONG,), growth=2.0)
    assert error.reasons[0] == (
        "the batch is larger than planned: input_ids [6, 4096], planned [6, 2048]"
    )
    # With every block recomputed, 15 of 20 GiB stay and 5 are twice as much: 15 GiB
    # of 12 reserved, times 25/20.
    assert "about 15.00 GiB reserved" in str(error)


def test_fragmentation_is_told_from_too_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    broken = cuda_text(allocated="18.00 GiB", idle="5.00 GiB", free="100.00 MiB")
    (reason,) = report(broken, sample_plan()).reasons
    assert reason == (
        "fragmentation: 5.00 GiB are reserved and free, but not in one piece; start "
        "with PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (reason,) = report(broken, sample_plan()).reasons
    assert "PYTORCH" not in reason  # it is on already
    full = cuda_text(allocated="22.50 GiB", idle="1.00 GiB", free="10.00 MiB")
    assert not any("fragmentation" in each for each in report(full).reasons)


def test_memory_outside_this_process_is_a_reason_of_its_own() -> None:
    # 24 GiB - 0.5 free - 20 reserved - 0.5 of context, as planned.
    (reason,) = report(plan=sample_plan()).reasons
    assert reason.startswith("other processes hold about 3.00 GiB of the card")
    alone = cuda_text(allocated="21.00 GiB", idle="1.00 GiB", free="1.40 GiB")
    reasons = report(alone, sample_plan()).reasons
    assert not any("other processes" in reason for reason in reasons)


def test_a_smaller_card_than_the_planned_one_is_named() -> None:
    error = report(
        cuda_text(total="16.00 GiB", allocated="14.50 GiB", free="0 bytes"),
        sample_plan(),
    )
    assert error.reasons == ("the card has 16.00 GiB, and the plan is for 24.00 GiB",)


def test_what_else_is_alive_is_the_reason_where_no_other_is() -> None:
    full = cuda_text(allocated="22.40 GiB", idle="0 bytes", free="1.00 GiB")
    (reason,) = report(full, sample_plan()).reasons
    assert reason.startswith("this process holds more than the plan knows of")
    assert report(full).reasons == ()  # nothing was predicted


def test_an_interrupted_optimizer_is_said_to_have_left_half_an_update() -> None:
    text = str(report(phase="optimizer", weights_intact=False))
    assert "go on from the last state that was saved" in text
    assert "are as before" not in text


def test_when_no_smaller_micro_batch_is_left_the_way_is_to_plan_again() -> None:
    recipe = replace(sample_recipe(), batch_size=1, gradient_accumulation_steps=1)
    error = report(recipe=recipe)
    assert error.recipe is None
    # 20 GiB reserved and 0.5 free.
    assert str(error).splitlines()[-1] == (
        '  plan = budgetfit.plan(model, vram="20.5GiB")'
    )
    assert 'vram="..."' in str(report("CUBLAS_STATUS_ALLOC_FAILED", recipe=recipe))


def test_without_plan_and_numbers_the_report_is_short() -> None:
    error = report("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
    assert len(str(error).splitlines()) == 5
    assert str(error).startswith(
        "Out of memory in the backward of model.layers.3.mlp, micro-batch 1 of 11.\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("anything"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_every_way_to_say_out_of_memory_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("CUDA out of memory")]
)
def test_other_errors_are_none(error: Exception) -> None:
    assert not is_out_of_memory(error)
