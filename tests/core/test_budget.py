"""The budget: what of a card is left for the allocator, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.core.budget import Budget, context_bytes, plan_budget
from budgetfit.core.errors import InputError
from budgetfit.core.gpus import Gpu, all_gpus, find_gpu

MIB = 2**20
GIB = 2**30

# Out-of-memory messages that PyTorch users published (decision 0005): process memory
# and allocated memory in GiB, reserved but unallocated in MiB. One process, one GPU,
# no CUDA graphs. What is left over is context and loaded kernels.
REPORTS = (
    *(("t4", 14.71, 14.54, 10.14), ("t4", 14.37, 14.20, 59.17)),
    *(("t4", 14.37, 12.77, 1484.8), ("t4", 14.74, 14.31, 320.39)),
    *(("t4", 10.20, 9.21, 899.87), ("t4", 14.52, 14.06, 330.42)),
    ("p100-16gb", 15.77, 15.44, 20.58),
    *(("v100-32gb", 31.54, 28.49, 2744.3), ("v100-32gb", 31.72, 29.66, 1720.3)),
    ("v100-32gb", 16.95, 2.10, 14807.0),
    *(("rtx-2080-ti", 10.69, 10.48, 29.33), ("rtx-2080-ti", 10.01, 8.43, 1351.7)),
    *(("rtx-4090", 22.64, 20.64, 1587.2), ("rtx-4090", 22.82, 22.37, 18.93)),
    *(("rtx-4090", 23.48, 23.11, 0.14), ("rtx-4090", 22.58, 22.05, 94.18)),
    *(("rtx-4090", 23.34, 18.90, 4106.2), ("rtx-4090", 14.56, 13.86, 213.20)),
    *(("rtx-4090", 22.39, 21.58, 350.11), ("rtx-4090", 22.69, 21.72, 520.54)),
    ("rtx-4090", 23.04, 21.37, 1249.3),
    *(("rtx-3090", 19.81, 13.90, 5744.6), ("rtx-3090", 23.68, 23.04, 301.75)),
    ("rtx-3090", 19.40, 17.97, 1044.5),
    ("a100-40gb", 39.12, 25.48, 13424.6),
    *(("a100-80gb", 9.25, 8.27, 500.38), ("a100-80gb", 17.37, 14.34, 2590.7)),
    *(("h100-80gb", 79.08, 77.69, 674.48), ("h100-80gb", 61.19, 31.03, 30208.0)),
    *(("h200", 139.60, 138.14, 824.86), ("h200", 139.20, 2.05, 139919.4)),
    ("b200", 168.34, 167.64, 4.62),
    *(("rtx-5090", 31.29, 30.80, 2.80), ("rtx-5090", 26.89, 25.95, 343.86)),
    ("rtx-5090", 31.34, 30.74, 19.41),
    *(("a40", 12.99, 12.54, 149.96), ("l40s", 44.47, 43.89, 79.61)),
    *(("a10", 21.91, 21.69, 1.55), ("a10", 22.12, 21.72, 23.99)),
    *(("a10g", 22.03, 20.51, 1249.3), ("a10g", 22.05, 21.68, 24.24)),
    ("a10g", 22.04, 21.75, 15.17),
    *(("rtx-a6000", 47.49, 46.91, 284.96), ("rtx-a6000", 47.41, 47.05, 19.80)),
    ("rtx-6000-ada", 44.40, 43.94, 41.95),
)


def test_usable_is_what_context_and_headroom_leave() -> None:
    budget = Budget(total_bytes=1000, context_bytes=100, headroom_bytes=30)
    assert budget.usable_bytes == 870


def test_an_rtx_4090_leaves_22_9_gib() -> None:
    # 128 SMs x 1536 threads x 2400 bytes + 64 MiB = 538,968,064 bytes of context;
    # 1 % of 25,382,879,232 bytes = 253,828,792 bytes of headroom.
    gpu = find_gpu("rtx-4090")
    budget = plan_budget(gpu.total_bytes, gpu)
    assert budget == Budget(25_382_879_232, 538_968_064, 253_828_792)
    assert budget.usable_bytes == 24_590_082_376


def test_small_cards_keep_at_least_128_mib_of_headroom() -> None:
    gpu = find_gpu("rtx-3070")
    assert plan_budget(gpu.total_bytes, gpu).headroom_bytes == 128 * MIB


def test_headroom_that_was_asked_for_replaces_the_rule() -> None:
    budget = plan_budget(24 * GIB, find_gpu("rtx-4090"), headroom_bytes=0)
    assert budget.headroom_bytes == 0
    assert budget.usable_bytes == 24 * GIB - budget.context_bytes


def test_a_limit_below_the_card_is_kept() -> None:
    assert plan_budget(10 * GIB, find_gpu("h200")).total_bytes == 10 * GIB


@pytest.mark.parametrize(
    ("name", "process_gib", "allocated_gib", "unused_mib"), REPORTS
)
def test_default_headroom_covers_what_published_processes_took_beyond_the_estimate(
    name: str, process_gib: float, allocated_gib: float, unused_mib: float
) -> None:
    reported_mib = (process_gib - allocated_gib) * 1024 - unused_mib
    estimate_mib = context_bytes(find_gpu(name)) / MIB
    # The reports have two decimals of a GiB: 10 MiB.
    assert reported_mib < estimate_mib + 128 - 10
    assert reported_mib > estimate_mib - 200


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
