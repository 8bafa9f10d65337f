"""Loading against recordings of the libraries' own, and its laws."""

import json
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

from budgetfit.core.allocator.settings import DEFAULT_SETTINGS
from budgetfit.core.budget import Budget
from budgetfit.core.step_trace import EMPTY_CACHE, StepTrace
from budgetfit.inputs.arguments import Arguments
from budgetfit.memory.caching_allocator import CachingAllocator
from budgetfit.memory.replay import setup_fits
from budgetfit.traces import session
from budgetfit.traces.quantized_loading import Loading
from budgetfit.workload.workload import Workload
from tests.accuracy.loading.cases import CASES, FILE, LENGTH, SAMPLES
from tests.accuracy.loading.report import FIGURES, H100, ON_H100, compare, table

RECORDED = json.loads(FILE.read_text())
# Threads load what is not quantised, in no fixed order; where an outlier is depends on
# values, which the null driver lacks. All else is equal to the byte.
WITHIN = {
    "full, device_map": (0.0, 0.06),
    "lora, device_map": (0.0, 0.03),
    "int8": (-0.01, 0.01),
    "int8, wide": (-0.01, 0.01),
}


@pytest.mark.parametrize("name", CASES)
def test_loading_and_training_after_it_are_predicted(name: str) -> None:
    found = compare(name, RECORDED[name])
    lowest, highest = WITHIN.get(name, (0.0, 1e-5))
    for figure in FIGURES:
        assert lowest <= found.error(figure) <= highest, figure


def workload_of(asked: dict[str, object]) -> Workload:
    case = CASES["qlora"]
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    return (
        Arguments(
            model=case.config,
            gpu="rtx-4090",
            batch={"input_ids": ids, "labels": ids},
            precision="bf16-mixed",
            **asked,
        )
        .parsed()
        .workload
    )


def traced(asked: dict[str, object]) -> tuple[StepTrace, StepTrace]:
    """A trace's steps, and the same with loading."""
    workload = workload_of(asked)
    with mock.patch.object(session.Loading, "before", lambda _, trace: trace):
        steps = session.TraceSession(workload).exact(CASES["qlora"].recipe)
    return steps, Loading(workload.model).before(steps)


def test_loading_is_found_once_for_a_session() -> None:
    case = CASES["qlora"]
    with mock.patch.object(session, "Loading", wraps=session.Loading) as found:
        traces = session.TraceSession(workload_of(case.asked))
        one = traces.exact(case.recipe)
        other = traces.exact(replace(case.recipe, optimizer="adamw_torch"))
        longer = traces.of_same_model(traces.workload).exact(case.recipe)
    found.assert_called_once()
    loading = [trace.events[: trace.phases[0].end].tolist() for trace in (one, longer)]
    assert loading[0] == loading[1]
    assert len(other.events) != len(one.events)


@pytest.mark.parametrize("name", ["qlora", "qlora, flat", "qlora, tied", "int8"])
def test_what_lives_after_loading_is_the_model(name: str) -> None:
    steps, loaded = traced(CASES[name].asked)
    before, after = (alive_after_setup(trace) for trace in (steps, loaded))
    assert before <= after
    table_bytes = 1024 if CASES[name].asked.get("double_quantization", True) else 0
    extra = sum(int(loaded.fixed_bytes[storage]) for storage in after - before)
    assert extra == (table_bytes if name != "int8" else 0)


def test_steps_and_their_phases_stay_as_they_are() -> None:
    steps, loaded = traced(CASES["qlora"].asked)
    shift = len(loaded.events) - len(steps.events)
    assert loaded.events[shift + steps.phases[0].end :].tolist() == (
        steps.events[steps.phases[0].end :].tolist()
    )
    assert [row.end - row.start for row in loaded.phases[1:]] == [
        row.end - row.start for row in steps.phases[1:]
    ]
    assert (loaded.ops.event == steps.ops.event + shift).all()
    assert Counter(loaded.events.tolist())[EMPTY_CACHE] == 1


def test_a_base_that_is_not_quantised_is_loaded_on_the_host() -> None:
    steps, loaded = traced(CASES["lora, moved"].asked)
    assert loaded is steps


@pytest.mark.parametrize("name", ["qlora", "int8"])
def test_loading_alone_fits_where_that_of_a_trace_does(name: str) -> None:
    workload = workload_of(CASES[name].asked)
    loading, gpu = Loading(workload.model), workload.gpu
    trace = session.TraceSession(workload).exact(CASES["qlora"].recipe)

    def fits(limit: int) -> tuple[bool, bool]:
        alone = loading.fits(limit, DEFAULT_SETTINGS, gpu.total_bytes)
        budget = Budget(total_bytes=limit, context_bytes=0, headroom_bytes=0)
        return alone, setup_fits(trace, SAMPLES, gpu, budget)

    verdicts = {fits(mib << 20) for mib in range(5, 400, 5)}
    assert verdicts == {(False, False), (True, True)}


def test_what_is_not_quantised_always_loads() -> None:
    model = workload_of(CASES["lora, moved"].asked).model
    assert Loading(model).fits(0, DEFAULT_SETTINGS, 1 << 40)


def alive_after_setup(trace: StepTrace) -> set[int]:
    """Storages that live when setup ends."""
    alive: set[int] = set()
    for event in trace.events[: trace.phases[0].end].tolist():
        if event > 0:
            assert event - 1 not in alive
            alive.add(event - 1)
        elif event < 0:
            alive.remove(-event - 1)
    return alive


def test_an_emptied_cache_releases_whole_segments() -> None:
    sizes = [30 << 20, 12 << 20, 4 << 20]
    allocator = CachingAllocator(1 << 40)
    allocator.run([1, 2, 3, -1, -2], sizes)
    assert allocator.reserved_bytes >> 20 == 30 + 12 + 20
    allocator.run([EMPTY_CACHE], sizes)
    assert allocator.reserved_bytes >> 20 == 20


def test_the_table_begins_with_the_worst() -> None:
    rows = [compare(name, RECORDED[name]) for name in ("qlora", "lora, device_map")]
    lines = table(rows).splitlines()
    assert lines[1].startswith("lora, device_map")
    assert "2 cases" in lines[-1]


def test_qlora_on_a_real_h100_is_predicted_to_the_byte() -> None:
    found = compare("qlora", json.loads(ON_H100.read_text())["qlora"], H100)
    assert {figure: found.error(figure) for figure in FIGURES} == dict.fromkeys(
        FIGURES, 0.0
    )
