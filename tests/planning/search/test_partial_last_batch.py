"""A smaller batch on the way can make a plan that fits too large."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import transformers

import budgetfit
from budgetfit.api.compare import compare
from budgetfit.core.budget import Budget
from budgetfit.core.plan import Alternative, Estimate
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import StepTrace
from budgetfit.core.varying_lengths import VaryingLengths
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import replay
from budgetfit.planning.alternatives import best_settings
from budgetfit.planning.search import last_batch
from budgetfit.planning.search.accumulation import ACCUMULATING
from budgetfit.planning.search.last_batch import (
    LEFT_ROOM,
    NEEDS_DROP_LAST,
    AfterLastBatch,
    after_last_batch,
    last_batch_warnings,
)
from budgetfit.planning.search.varying_lengths import JudgedLengths
from budgetfit.planning.session import PlanningSession, Request
from tests.memory.made_traces import MIB, TraceMaker
from tests.models import gpt2_config
from tests.traced import ROOMY

pytestmark = pytest.mark.usefixtures("kept_traces")
ADA = find_gpu("rtx-4090")
LENGTHS = VaryingLengths(
    span="samples of 32 to 64 tokens",
    shortest=32,
    longest=64,
    measure="expandable segments",
    reserved_bytes=1,
    updates=1,
    samples_per_s=1.0,
    plain_samples_per_s=1.0,
    grouped_samples_per_s=1.0,
    fits=True,
)


def splitting(spare_mib: int = 0) -> StepTrace:
    """Three samples reserve 180 + 100 MiB; one sample splits these blocks badly.

    It takes 60 of the 100, so that the 100 split the 180: after them, 80 and the 100
    are free, of which two times 90 find only one. A spare block is free by then.
    """
    made = TraceMaker()
    for step in (0, 1):
        with made.phase("forward", step):
            made.malloc("x", per_sample=60 * MIB)
            made.malloc("weights", 100 * MIB)
            if spare_mib:
                made.malloc("spare", spare_mib * MIB)
                made.free("spare")
            made.free("x")
            made.malloc("one", 90 * MIB)
            made.malloc("two", 90 * MIB)
            made.free("weights", "one", "two")
    return made.trace()


def within(limit_mib: int) -> Budget:
    return Budget(total_bytes=limit_mib * MIB, context_bytes=0, headroom_bytes=0)


def after(trace: StepTrace, batch_size: int, limit_mib: int) -> AfterLastBatch:
    recipe = Recipe(batch_size=batch_size)
    return after_last_batch(trace, recipe, ADA, within(limit_mib))


def test_split_blocks_in_use_cannot_be_released_and_memory_runs_out() -> None:
    trace = splitting()
    assert replay(trace, 3, ADA).reserved_bytes == 280 * MIB
    assert after(trace, 3, 300) == AfterLastBatch(370 * MIB, runs_out=True)
    (warning,) = last_batch_warnings(after(trace, 3, 300), 70 * MIB)
    assert "370 MiB would be reserved, 70 MiB more than are plannable" in warning
    assert "may run out of memory. Pass drop_last=True" in warning


def test_where_the_cache_can_be_emptied_the_step_goes_on() -> None:
    found = after(splitting(spare_mib=50), 3, 372)
    assert found == AfterLastBatch(420 * MIB, runs_out=False)
    (warning,) = last_batch_warnings(found, 48 * MIB)
    assert "empties its cache and goes on" in warning


def test_there_is_no_warning_where_it_still_fits() -> None:
    assert after(splitting(), 3, 370) == AfterLastBatch(370 * MIB, runs_out=False)
    assert last_batch_warnings(after(splitting(), 3, 370), 0) == ()


def test_a_batch_of_one_has_no_smaller_one() -> None:
    assert after(splitting(), 1, 1) == AfterLastBatch(0, runs_out=False)


def _config() -> transformers.GPT2Config:
    return gpt2_config(n_embd=128, n_positions=1024, vocab_size=4096, use_cache=False)


SETTINGS: dict[str, Any] = {
    "max_length": 64,
    "precision": "bf16-mixed",
    "batch_size": 8,
}


def _plan(**settings: Any) -> budgetfit.Plan:
    return budgetfit.plan(_config(), gpu="rtx-4090", **SETTINGS, **settings)


def _runs_out_above(most_bytes: int, *arguments: Any) -> AfterLastBatch:
    trace, recipe, gpu, budget = arguments
    needed = replay(trace, recipe.batch_size, gpu).reserved_bytes
    usable, beyond = budget.usable_bytes, max(needed - most_bytes, 0)
    return AfterLastBatch(usable + beyond, runs_out=needed > most_bytes)


def test_room_is_left_for_the_last_batch_where_memory_would_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = _plan()
    assert LEFT_ROOM not in plain.warnings
    most = plain.estimate.reserved_bytes * 3 // 4
    monkeypatch.setattr(last_batch, "after_last_batch", partial(_runs_out_above, most))
    monkeypatch.setattr(last_batch, "MOST_GROWTH", math.inf)
    tight = _plan(vram=plain.estimate.process_bytes, headroom=0)
    assert tight.estimate.reserved_bytes <= most
    assert LEFT_ROOM in tight.warnings


def made_estimate(batch_size: int, step_ms: float, *, fits: bool = True) -> Estimate:
    return Estimate(
        recipe=Recipe(batch_size=batch_size),
        **dict.fromkeys(("allocated_bytes", "reserved_bytes", "process_bytes"), 0),
        **dict.fromkeys(("phase_peaks_bytes", "at_peak_bytes", "timeline")),
        step_ms=step_ms,
        fits=fits,
    )


def made_session(
    request: Request, effective_batch_size: int | None = None
) -> PlanningSession:
    """A session in which 48 samples do not fit; a step takes 1 ms more than samples."""
    made = SimpleNamespace(
        budget=SimpleNamespace(usable_bytes=0),
        judge=lambda recipe: made_estimate(
            recipe.batch_size, 1 + recipe.batch_size, fits=recipe.batch_size != 48
        ),
        rank=lambda each: (each.step_ms / each.recipe.batch_size,),
        request=request,
        settings=SimpleNamespace(effective_batch_size=effective_batch_size),
    )
    return cast(PlanningSession, made)


@pytest.mark.parametrize(
    ("request_", "effective", "has_room", "chosen"),
    [
        (Request(budget=ROOMY), None, 49, 47),  # one less does not fit, two less do
        (Request(budget=ROOMY), None, 46, 45),  # then four less
        (Request(budget=ROOMY), None, 40, 30),  # sixteen less lose too much: a search
        (Request(budget=ROOMY, batch_size=49), None, 49, 30),
        (Request(budget=ROOMY, objective="memory"), None, 49, 30),
        (Request(budget=ROOMY), 49, 49, 30),  # 7 is the next divisor
    ],
)
def test_a_few_samples_less_are_preferred_to_a_search(
    monkeypatch: pytest.MonkeyPatch,
    request_: Request,
    effective: int | None,
    has_room: int,
    chosen: int,
) -> None:
    session = made_session(request_, effective)
    result = session, session, made_estimate(30, 40)
    runs_out = AfterLastBatch(1, runs_out=True)
    monkeypatch.setattr(last_batch, "with_less_memory", lambda *_: result)
    monkeypatch.setattr(
        last_batch,
        "_judged",
        lambda _, __, each: runs_out if each.recipe.batch_size >= has_room else None,
    )
    best = made_estimate(49, 50)
    found, warnings = last_batch.with_room_for_last_batch(session, best)
    assert (found.recipe.batch_size, warnings) == (chosen, (LEFT_ROOM,))


@pytest.mark.parametrize(("searched_ms", "chosen"), [(90, 0), (110, 1), (None, 1)])
def test_a_practice_with_room_is_preferred_to_a_slower_search_result(
    monkeypatch: pytest.MonkeyPatch, searched_ms: float | None, chosen: int
) -> None:
    session = made_session(Request(budget=ROOMY, objective="memory"))
    best, full, practice, searched = (
        made_estimate(1, step_ms) for step_ms in (70, 80, 100, searched_ms or 0)
    )
    result = None if searched_ms is None else (session, session, searched)
    runs_out = AfterLastBatch(1, runs_out=True)
    monkeypatch.setattr(last_batch, "with_less_memory", lambda *_: result)
    monkeypatch.setattr(
        last_batch,
        "_judged",
        lambda _, __, each: runs_out if each.step_ms in {70, 80} else None,
    )
    found, warnings = last_batch.with_room_for_last_batch(
        session, best, [full, practice, replace(practice, fits=False, step_ms=1)]
    )
    assert found.step_ms == (searched_ms, 100)[chosen]
    assert warnings == (LEFT_ROOM,)


def test_a_compared_card_has_the_settings_of_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the room for the last batch, that is: the fastest settings have none."""
    plain = _plan()
    most = plain.estimate.reserved_bytes * 3 // 4
    monkeypatch.setattr(last_batch, "after_last_batch", partial(_runs_out_above, most))
    monkeypatch.setattr(last_batch, "MOST_GROWTH", math.inf)
    headroom = ADA.total_bytes - plain.estimate.process_bytes
    tight = _plan(headroom=headroom)
    ((row,), _) = compare(_config(), ["rtx-4090"], headroom=headroom, **SETTINGS)
    assert row.estimate is not None
    assert row.estimate.recipe == tight.recipe
    assert tight.recipe != plain.recipe
    for name in ("reserved_bytes", "step_ms", "host_bytes", "fits"):
        assert getattr(row.estimate, name) == getattr(tight.estimate, name)


def test_a_faster_row_without_room_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = _plan()
    most = plain.estimate.reserved_bytes * 3 // 4
    monkeypatch.setattr(last_batch, "after_last_batch", partial(_runs_out_above, most))
    monkeypatch.setattr(last_batch, "MOST_GROWTH", math.inf)
    tight = _plan(vram=plain.estimate.process_bytes, headroom=0)
    faster = [
        row
        for row in tight.judged_alternatives
        if row.fits
        and row.label != ACCUMULATING
        and not row.changes_training
        and row.estimate.samples_per_s > tight.estimate.samples_per_s
    ]
    assert {row.label for row in faster} == {
        "everything kept",
        "every block recomputed",
    }
    assert {row.note for row in faster} == {NEEDS_DROP_LAST}
    assert "gradient checkpointing on: needs drop_last=True" in str(tight)


def test_what_a_row_says_of_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        last_batch, "_judged", lambda *_: SimpleNamespace(runs_out=True)
    )
    session: Any = SimpleNamespace(rank=lambda estimate: estimate)
    faster: Any = 1
    row = Alternative(label="row", estimate=faster, fits=True, note="a condition")
    (noted,) = last_batch.with_last_batch_notes(session, session.rank(2), [row])
    assert noted.note == f"a condition; {NEEDS_DROP_LAST}"


def test_where_nothing_else_is_allowed_the_plan_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = AfterLastBatch(1 << 40, runs_out=True)
    monkeypatch.setattr(last_batch, "_judged", lambda *_: found)
    kept = _plan(checkpointing="none")
    assert kept.recipe.segments == ()
    assert any("the next full batch may run out" in each for each in kept.warnings)


def test_under_expandable_segments_the_last_batch_is_judged_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is said of what only segments of fixed sizes would do."""

    def judged(*arguments: Any) -> AfterLastBatch:
        *_, budget = arguments
        fixed = not budget.allocator.expandable_segments
        return AfterLastBatch(budget.usable_bytes + fixed, runs_out=False)

    def needing_them(_: object, best: Estimate) -> JudgedLengths:
        return JudgedLengths(estimate=best, lengths=LENGTHS)

    monkeypatch.setattr(last_batch, "after_last_batch", judged)
    monkeypatch.setattr(last_batch, "MOST_GROWTH", math.inf)
    without = _plan()
    assert any("after a smaller last batch" in each for each in without.warnings)
    monkeypatch.setattr(best_settings, "judge_all_lengths", needing_them)
    expanding = _plan()
    assert expanding.needs_expandable_segments
    assert not any("last batch" in each for each in expanding.warnings)
