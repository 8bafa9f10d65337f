"""The budget: what of a card is left for the allocator, and why."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.core.budget import Budget, plan_budget
from budgetfit.errors import InputError
from budgetfit.gpus.cuda_context import (
    Report,
    context_bytes,
    estimated_context,
    measured_context,
    published_reports,
)
from budgetfit.gpus.table import Gpu, all_gpus, find_gpu

MIB = 2**20
GIB = 2**30


def test_usable_is_what_context_and_headroom_leave() -> None:
    budget = Budget(total_bytes=1000, context_bytes=100, headroom_bytes=30)
    assert budget.usable_bytes == 870


def test_an_rtx_4090_leaves_22_9_gib() -> None:
    # 128 SMs x 1536 threads x 2400 bytes + 64 MiB = 538,968,064 bytes of context;
    # 1 % of 25,382,879,232 bytes = 253,828,792 bytes of headroom.
    gpu = find_gpu("rtx-4090")
    budget = plan_budget(gpu.total_bytes, gpu)
    assert budget.total_bytes == 25_382_879_232
    assert budget.context_bytes == context_bytes(gpu) == 538_968_064
    assert budget.headroom_bytes == 253_828_792
    assert budget.context == estimated_context(gpu)
    assert budget.usable_bytes == 24_590_082_376


def test_what_was_measured_replaces_the_estimate() -> None:
    measured = measured_context([300 * MIB, 340 * MIB], "here")
    budget = plan_budget(8 * GIB, find_gpu("t4"), 0, measured)
    assert budget.usable_bytes == 8 * GIB - 340 * MIB
    assert budget.context == measured


def test_small_cards_keep_at_least_128_mib_of_headroom() -> None:
    gpu = find_gpu("rtx-3070")
    assert plan_budget(gpu.total_bytes, gpu).headroom_bytes == 128 * MIB


def test_headroom_that_was_asked_for_replaces_the_rule() -> None:
    budget = plan_budget(24 * GIB, find_gpu("rtx-4090"), headroom_bytes=0)
    assert budget.headroom_bytes == 0
    assert budget.usable_bytes == 24 * GIB - budget.context_bytes


def test_a_limit_below_the_card_is_kept() -> None:
    assert plan_budget(10 * GIB, find_gpu("h200")).total_bytes == 10 * GIB


@pytest.mark.parametrize("report", published_reports(), ids=itertools.count())
def test_default_headroom_covers_what_published_processes_took_beyond_the_estimate(
    report: Report,
) -> None:
    planned_bytes = plan_budget(16 * GIB, find_gpu(report.gpu)).context_bytes
    # The reports have two decimals of a GiB: 10 MiB.
    assert report.outside_bytes < planned_bytes + 118 * MIB
    assert report.outside_bytes > planned_bytes - 200 * MIB


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_every_card_of_the_table_leaves_at_least_90_percent(gpu: Gpu) -> None:
    budget = plan_budget(gpu.total_bytes, gpu)
    assert budget.usable_bytes > 0.90 * gpu.total_bytes


@pytest.mark.parametrize("total_bytes", [1, 600 * MIB])
def test_a_budget_that_leaves_nothing_is_refused_with_its_parts(
    total_bytes: int,
) -> None:
    with pytest.raises(InputError, match="leave nothing to plan with") as caught:
        plan_budget(total_bytes, find_gpu("rtx-4090"))
    assert "the CUDA context takes about 514 MiB" in str(caught.value)
    assert "the headroom 128 MiB" in str(caught.value)


def test_a_budget_that_leaves_exactly_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="leave nothing to plan with"):
        Budget(total_bytes=100, context_bytes=60, headroom_bytes=40)
    assert Budget(101, 60, 40).usable_bytes == 1


def test_headroom_as_large_as_the_card_is_refused() -> None:
    with pytest.raises(InputError, match="or less headroom"):
        plan_budget(8 * GIB, find_gpu("t4"), headroom_bytes=8 * GIB)


def test_negative_headroom_is_refused() -> None:
    with pytest.raises(InputError, match="A headroom of -1 MiB is below zero"):
        plan_budget(8 * GIB, find_gpu("t4"), headroom_bytes=-MIB)


@given(st.integers(2 * GIB, 300 * GIB), st.integers(1, GIB))
def test_more_memory_never_leaves_less(total_bytes: int, more_bytes: int) -> None:
    gpu = find_gpu("h100")
    smaller = plan_budget(total_bytes, gpu)
    larger = plan_budget(total_bytes + more_bytes, gpu)
    assert larger.usable_bytes >= smaller.usable_bytes
    assert larger.usable_bytes <= smaller.usable_bytes + more_bytes


def test_it_holds_what_is_usable_and_no_byte_more() -> None:
    budget = Budget(
        total_bytes=1000, context_bytes=100, headroom_bytes=50, host_ram_bytes=10
    )
    assert budget.holds(850, 10)
    assert not budget.holds(851, 0)
    assert not budget.holds(0, 11)
    assert replace(budget, host_ram_bytes=None).holds(850, 1 << 40)
