"""What is played beyond the trace: more micro-steps, more steps, other batch sizes."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetfit.core.step_trace import StepTrace
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.caching_allocator import AllocatorRun, CachingAllocator
from budgetfit.memory.replay import UNLIMITED_BYTES, replay, unlimited_replay
from budgetfit.memory.replay_schedule import (
    TURNING_REPEATS,
    append_next_step,
    event_ranges,
    with_micro_steps,
)
from tests.memory.made_traces import MIB, TraceMaker

ADA = find_gpu("rtx-4090")


def test_nothing_is_a_phase_too() -> None:
    made = TraceMaker()
    with made.phase("forward"):
        made.malloc("x", MIB)
    with made.phase("backward"):
        pass
    with made.phase("optimizer"):
        made.free("x")
    assert [row.phase for row in event_ranges(made.trace())] == [
        "forward",
        "backward",
        "optimizer",
    ]


def two_micro_steps(steps: int = 2) -> StepTrace:
    """An activation of 20 MiB a sample; the last batch outlives its micro-step."""
    made = TraceMaker()
    with made.phase("setup", -1):
        made.malloc("w", 40 * MIB, category="parameters")
    for step in range(steps):
        for micro_step in (0, 1):
            with made.phase("forward", step, micro_step):
                made.malloc(f"batch {micro_step}", per_sample=2 * MIB, category="batch")
                made.malloc("x", per_sample=20 * MIB)
            with made.phase("backward", step, micro_step):
                if micro_step == 0:
                    made.malloc("gw", 40 * MIB, category="gradients")
                made.free("x")
                if micro_step == 0:
                    made.free("batch 0")
        with made.phase("optimizer", step, 1):
            made.free("gw", "batch 1")
    return made.trace()


def micro_steps_of(trace: StepTrace, micro_steps: int, step: int) -> list[int]:
    rows, _ = with_micro_steps(trace, micro_steps)
    return sorted({row.micro_step for row in rows if row.step == step})


@pytest.mark.parametrize(
    ("micro_steps", "played"), [(2, [0, 1]), (3, [0, 1, 2]), (64, [0, 1, 2, 3])]
)
def test_up_to_two_micro_steps_are_added_to_each_step(
    micro_steps: int, played: list[int]
) -> None:
    trace = two_micro_steps()
    assert [micro_steps_of(trace, micro_steps, step) for step in (0, 1)] == [played] * 2


def test_an_added_micro_step_gives_its_batch_back_before_the_next_comes() -> None:
    trace = two_micro_steps()
    rows, events = with_micro_steps(trace, 4)
    played = [event for row in rows for event in events[row.start : row.end]]
    alive: set[int] = set()
    for event in played:
        if event > 0:
            assert event not in alive
            alive.add(event)
        else:
            alive.remove(-event)
    assert alive == {1}  # the weights
    assert events[: len(trace.events)] == trace.events.tolist()
    few, many = (replay(trace, 1, ADA, micro_steps=n) for n in (2, 4))
    assert many.allocated_bytes == few.allocated_bytes == (40 + 40 + 20 + 2) * MIB


def runs_of(trace: StepTrace, micro_steps: int) -> list[AllocatorRun]:
    """What each range does, every one of them run."""
    parts, events, sizes, allocator = unlimited_replay(
        trace, 2, ADA, micro_steps=micro_steps
    )
    ranges = [events[part.event_range.start : part.event_range.end] for part in parts]
    return [allocator.run(each, sizes) for each in ranges]


def count_of_runs(trace: StepTrace, micro_steps: int) -> int:
    run = CachingAllocator.run
    with mock.patch.object(
        CachingAllocator, "run", autospec=True, side_effect=run
    ) as it:
        replay(trace, 2, ADA, micro_steps=micro_steps)
    return it.call_count


def test_a_micro_step_that_starts_as_the_one_before_it_is_not_run_again() -> None:
    trace = two_micro_steps()
    # The last two of four micro-steps, but for what frees the last batch, in two steps;
    # and all of the step that is repeated.
    in_a_step = 4 * 2 + 2 + 1
    skipped = 2 * (2 * 2 + 1) + in_a_step
    assert count_of_runs(trace, 4) == len(runs_of(trace, 4)) - skipped


MOST_LIFE = 6
SIZES = st.integers(1, 30_000_000)


@given(st.lists(st.tuples(SIZES, st.integers(0, MOST_LIFE)), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_what_is_not_run_again_would_have_done_the_same(
    storages: list[tuple[int, int]],
) -> None:
    """Storages live for so many others; the last batch outlives its micro-step."""
    made = TraceMaker()
    with made.phase("setup", -1):
        made.malloc("w", 3 * MIB)
    for step in (0, 1):
        for micro_step in (0, 1):
            with made.phase("forward", step, micro_step):
                made.malloc(f"batch {micro_step}", per_sample=MIB)
                for index, (size, _) in enumerate(storages):
                    made.malloc(str(index), size, per_sample=512)
                    done = (n for n in range(index) if n + storages[n][1] == index)
                    made.free(*map(str, done))
            with made.phase("backward", step, micro_step):
                last = len(storages)
                for n in range(last - 1, -1, -1):
                    if micro_step == 0:
                        made.malloc(f"gradient {n}", storages[n][0])
                    if n + storages[n][1] >= last:
                        made.free(str(n))
                if micro_step == 0:
                    made.free("batch 0")
        with made.phase("optimizer", step, 1):
            for n, (size, _) in enumerate(storages):
                if step == 0:
                    made.malloc(f"state {n}", size)
                made.malloc(f"update {n}", size)
                made.free(f"update {n}", f"gradient {n}")
            made.free("batch 1")
    trace = made.trace()
    points = replay(trace, 2, ADA, limit_bytes=UNLIMITED_BYTES, micro_steps=5).points
    assert [(each.allocated_bytes, each.reserved_bytes) for each in points] == [
        (each.peak_allocated_bytes, each.peak_reserved_bytes)
        for each in runs_of(trace, 5)
    ]


def test_a_trace_of_one_micro_step_is_played_as_it_is() -> None:
    made = TraceMaker()
    with made.phase("forward"):
        made.malloc("x", MIB)
    trace = made.trace()
    assert with_micro_steps(trace, 8) == (list(event_ranges(trace)), [1])


def test_a_smaller_batch_and_a_full_one_may_follow_the_steady_step() -> None:
    timeline = replay(two_micro_steps(), 3, ADA, then_batch_sizes=(1, 3))
    forwards = [
        point.allocated_bytes // MIB
        for point in timeline.points
        if point.phase == "forward" and point.micro_step == 0
    ]
    full, small = 40 + 3 * 22, 40 + 22
    assert forwards == [full, full, full, small, full]


def test_a_last_step_that_leaves_something_has_no_step_of_another_size_after_it() -> (
    None
):
    made = TraceMaker()
    for step in (0, 1):
        with made.phase("forward", step):
            made.malloc(f"kept {step}", MIB)
    with pytest.raises(ValueError, match="cannot be repeated"):
        replay(made.trace(), 1, ADA, then_batch_sizes=(1,))


# Steps that leave something to the next one. -----------------------------------------


def holding_outputs(steps: int = 2, *, leak: bool = False) -> StepTrace:
    """Outputs of 30 MiB a sample live until the next forward has made new ones."""
    made = TraceMaker()
    with made.phase("setup", -1):
        made.malloc("w", 40 * MIB, category="parameters")
    for step in range(steps):
        with made.phase("forward", step):
            made.malloc("x", per_sample=20 * MIB)
            made.malloc(f"outputs {step}", per_sample=30 * MIB)
            if leak:
                made.malloc(f"lost {step}", MIB)
            if step:
                made.free(f"outputs {step - 1}")
        with made.phase("backward", step):
            made.free("x")
        with made.phase("optimizer", step):
            pass
    return made.trace()


def test_what_a_step_leaves_takes_turns_with_what_it_finds() -> None:
    timeline = replay(holding_outputs(), 2, ADA)
    forwards = [
        row.allocated_bytes for row in timeline.points if row.phase == "forward"
    ]
    assert forwards == [140 * MIB] + [200 * MIB] * (1 + TURNING_REPEATS)


def test_a_step_that_leaves_something_can_be_followed_by_smaller_ones() -> None:
    timeline = replay(holding_outputs(), 4, ADA, then_batch_sizes=(1, 1))
    last = [row.allocated_bytes for row in timeline.points if row.phase == "forward"]
    # The outputs of 4 samples, then those of one, are held while one sample runs.
    assert last[-2:] == [(40 + 120 + 50) * MIB, (40 + 30 + 50) * MIB]


def test_a_step_that_loses_something_is_not_repeated() -> None:
    trace = holding_outputs(leak=True)
    steps = {row.step for row in replay(trace, 2, ADA).points}
    assert steps == {-1, 0, 1}
    with pytest.raises(ValueError, match="cannot be repeated"):
        replay(trace, 2, ADA, then_batch_sizes=(1,))
    with pytest.raises(ValueError, match="cannot be repeated"):
        append_next_step(trace, 1, 1)


def test_the_next_step_is_the_one_that_would_have_been_traced() -> None:
    three = holding_outputs(3)
    two = append_next_step(holding_outputs(2), 1, 1)
    assert [phase[:3] for phase in two.phases] == [phase[:3] for phase in three.phases]
    for batch_size in (1, 3):
        made, traced = (replay(each, batch_size, ADA) for each in (two, three))
        assert made.points == traced.points


def test_what_is_freed_before_the_next_step_is_not_freed_twice() -> None:
    trace = holding_outputs(2)
    held = int(trace.events[trace.events > 0][-1]) - 1
    after = append_next_step(trace, 1, 1, [held])
    added = after.events[len(trace.events) :]
    assert -held - 1 not in added
    assert len(added) == 3  # of four: x, outputs and the death of x
    assert after.phases[-1].end == len(after.events)
