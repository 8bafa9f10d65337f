"""The CUDA context as a range: what published reports leave, and what was measured."""

import dataclasses
import math

import pytest

from budgetfit.gpus.cuda_context import (
    Report,
    context_bytes,
    eager_factors,
    estimated_context,
    measured_context,
    published_reports,
)
from budgetfit.gpus.table import Gpu, all_gpus, find_gpu

MIB = 2**20


def report(gpu: str, times: float) -> Report:
    """A process that took so many times what the line says."""
    return Report(gpu=gpu, outside_bytes=times * context_bytes(find_gpu(gpu)))


def test_a_report_is_what_process_allocated_and_unused_leave() -> None:
    # 14.71 GiB - 14.54 GiB - 10.14 MiB = 163.94 MiB
    first = published_reports()[0]
    assert first.gpu == "t4"
    assert first.outside_bytes / MIB == pytest.approx(163.94, abs=0.01)
    assert len(published_reports()) == 45


def test_the_range_is_the_mean_of_a_capability_and_the_pooled_spread() -> None:
    # Two capabilities. Log ratios: T4 +-0.1 about 0, RTX 4090 +-0.1 about log 2.
    # Four reports less two means leave two degrees of freedom: variance 0.04 / 2.
    # The T4's mean has its 2 reports at 0 and twice the mean of all, log(2) / 2.
    up, down = math.exp(0.1), math.exp(-0.1)
    reports = [
        *(report("t4", up), report("t4", down)),
        *(report("rtx-4090", 2 * up), report("rtx-4090", 2 * down)),
    ]
    found = estimated_context(find_gpu("t4"), reports=reports)
    line = context_bytes(find_gpu("t4"))
    middle = math.log(2) / 4
    width = 2.2 * math.sqrt(0.02 * 1.25)
    assert found.planned_bytes == line
    assert found.low_bytes == round(math.exp(middle - width) * line)
    assert found.typical_bytes == round(math.exp(middle) * line)
    assert found.high_bytes == round(math.exp(middle + width) * line)


def test_a_capability_without_reports_has_the_mean_of_all() -> None:
    reports = [report("t4", 1.0), report("t4", 1.0), report("rtx-4090", 4.0)]
    found = estimated_context(find_gpu("h200"), reports=reports)
    assert found.typical_bytes == round(
        math.exp(math.log(4) / 3) * context_bytes(find_gpu("h200"))
    )
    assert "none of them for capability 9.0" in found.source


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_what_is_planned_lies_within_the_range_of_every_card(gpu: Gpu) -> None:
    found = estimated_context(gpu)
    assert found.low_bytes < found.typical_bytes < found.high_bytes
    assert found.low_bytes < found.planned_bytes <= found.high_bytes
    assert found.planned_bytes == context_bytes(gpu)


def test_19_of_20_reports_lie_in_the_range_that_the_others_leave() -> None:
    reports = published_reports()
    inside = 0
    for index, left_out in enumerate(reports):
        others = reports[:index] + reports[index + 1 :]
        found = estimated_context(find_gpu(left_out.gpu), reports=others)
        inside += found.low_bytes <= left_out.outside_bytes <= found.high_bytes
    assert inside >= 0.95 * len(reports)


def test_the_source_counts_its_evidence() -> None:
    known = estimated_context(find_gpu("rtx-4090")).source
    alike = estimated_context(find_gpu("rtx-4080")).source
    assert known == "estimated from 45 published reports, 9 of them for this card"
    assert alike.endswith("11 of them for capability 8.9, none for this card")


def test_a_card_that_no_table_has_is_estimated_by_its_threads() -> None:
    small = dataclasses.replace(find_gpu("rtx-4090"), name="new-card", sm_count=64)
    whole = estimated_context(find_gpu("rtx-4090"))
    assert estimated_context(small).typical_bytes < whole.typical_bytes


def test_loading_every_kernel_at_the_start_takes_some_times_more() -> None:
    lazy = estimated_context(find_gpu("v100-16gb"))
    eager = estimated_context(find_gpu("v100-16gb"), eager=True)
    assert sorted(eager_factors()) == [2.3, 3.4, 3.8]
    assert eager.typical_bytes == pytest.approx(3.4 * lazy.typical_bytes, rel=1e-6)
    assert eager.planned_bytes == eager.high_bytes
    # bert-large on a V100 with CUDA 11.2: 1343 MiB (transformers' documentation).
    assert eager.low_bytes < 1343 * MIB < eager.high_bytes
    assert "CUDA_MODULE_LOADING" in eager.source


def test_the_largest_of_several_measurements_is_planned_with() -> None:
    found = measured_context([400 * MIB, 470 * MIB, 410 * MIB], "here on a day")
    assert found.planned_bytes == 470 * MIB
    assert (found.low_bytes, found.high_bytes) == (336 * MIB, 534 * MIB)
    assert found.typical_bytes == 410 * MIB
    assert found.source == "measured here on a day by verify"


def test_a_tiny_measurement_has_no_range_below_zero() -> None:
    assert measured_context([MIB], "here").low_bytes == 0
