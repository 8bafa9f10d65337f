"""The judge: traces written by hand, and laws that hold for every trace."""

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.budget import Budget
from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import CATEGORIES, Affine, Category, PhaseName, StepTrace
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import (
    UNLIMITED_BYTES,
    block_bytes,
    device_properties,
    replay,
    storage_bytes,
)
from budgetfit.memory.replay_schedule import COLLECTING_REPEATS
from budgetfit.planning.judge import judge
from tests.memory.made_traces import MIB, TraceMaker

ADA = find_gpu("rtx-4090")
EXPANDABLE = AllocatorSettings(expandable_segments=True)
LARGE = 20 * MIB  # requests above 10 MiB get segments of their own, in whole 2 MiB


def two_blocks(steps: int = 1) -> StepTrace:
    """Weights 40 MiB, an activation of 20 MiB a sample for each of two blocks."""
    made = TraceMaker("a", "b", layers=("a", "b"))
    with made.phase("setup", -1):
        made.malloc("w", 40 * MIB, category="parameters", layer=0)
    for step in range(steps):
        with made.phase("forward", step):
            made.malloc("batch", LARGE, category="batch")
            with made.block(0, "forward", step, takes="batch", gives="x"):
                made.malloc("x", per_sample=LARGE, layer=0)
            with made.block(1, "forward", step, takes="x", gives="y"):
                made.malloc("y", per_sample=LARGE, layer=1)
        with made.phase("backward", step):
            with made.block(1, "backward", step):
                made.malloc("gy", per_sample=LARGE, category="temporaries", layer=1)
                made.free("y")
            with made.block(0, "backward", step):
                made.malloc("gw", 40 * MIB, category="gradients", layer=0)
                made.free("x", "gy")
        with made.phase("optimizer", step):
            if step == 0:
                made.malloc("m", 40 * MIB, category="optimizer_state", layer=0)
            made.free("gw", "batch")
    return made.trace()


def allocated(timeline: MemoryTimeline) -> list[tuple[str, str, int]]:
    """(phase, block, peak in MiB) of each stretch."""
    return [
        (point.phase, point.block, point.allocated_bytes // MIB)
        for point in timeline.points
    ]


def test_each_stretch_has_the_most_that_was_alive_in_it() -> None:
    assert allocated(replay(two_blocks(), 3, ADA)) == [
        ("setup", "", 40),
        ("forward", "", 60),
        ("forward", "a", 120),  # 3 samples of 20
        ("forward", "b", 180),
        ("backward", "b", 240),  # both and a gradient
        ("backward", "a", 220),  # y gone, 40 of weight gradient
        ("optimizer", "", 140),  # weights, gradient, batch, state
    ]


def test_sizes_follow_the_batch() -> None:
    for batch_size in (1, 2, 7):
        last_block = 60 * MIB + 3 * batch_size * LARGE
        first_block = 100 * MIB + 2 * batch_size * LARGE  # with its weight's gradient
        peak = replay(two_blocks(), batch_size, ADA).allocated_bytes
        assert peak == max(last_block, first_block)


def test_the_peak_is_named_by_phase_block_category_and_layer() -> None:
    timeline = replay(two_blocks(), 3, ADA)
    assert timeline.allocated_bytes == 240 * MIB
    at = timeline.points[timeline.peak]
    assert (at.phase, at.block) == ("backward", "b")
    assert timeline.phase_peaks_bytes == {
        "forward": 180 * MIB,
        "backward": 240 * MIB,
        "optimizer": 140 * MIB,
    }
    assert {k: v // MIB for k, v in timeline.at_peak_bytes.items() if v} == {
        "parameters": 40,
        "batch": 20,
        "activations": 120,
        "temporaries": 60,
    }
    assert set(timeline.at_peak_bytes) == set(CATEGORIES)
    layers = [(name, size // MIB) for name, size in timeline.at_peak_layers]
    assert layers == [("b", 120), ("a", 100), ("", 20)]


def test_the_last_step_is_played_once_more_where_it_leaves_nothing_behind() -> None:
    steps = [point.step for point in replay(two_blocks(steps=2), 1, ADA).points]
    assert sorted(set(steps)) == [-1, 0, 1, 2]
    assert steps.count(1) == steps.count(2)


def test_of_several_equal_peaks_the_first_is_named() -> None:
    timeline = replay(two_blocks(steps=2), 3, ADA)
    peaks = [point.allocated_bytes for point in timeline.points]
    assert peaks.count(timeline.allocated_bytes) == 2  # and its repetition
    assert timeline.peak == peaks.index(timeline.allocated_bytes)
    assert timeline.points[timeline.peak].step == 1


def test_a_first_step_that_creates_states_is_not_played_again() -> None:
    steps = {point.step for point in replay(two_blocks(), 1, ADA).points}
    assert steps == {-1, 0}


def test_a_last_step_that_leaves_something_is_not_played_again() -> None:
    made = TraceMaker()
    for step in (0, 1):
        with made.phase("forward", step):
            made.malloc(f"kept {step}", LARGE)
    assert {point.step for point in replay(made.trace(), 1, ADA).points} == {0, 1}


def test_what_does_not_fit_is_said_with_where_and_how_much() -> None:
    timeline = replay(two_blocks(), 3, ADA, limit_bytes=200 * MIB)
    assert timeline.failed_bytes == 60 * MIB
    last = timeline.points[-1]
    assert (last.phase, last.block) == ("backward", "b")
    assert timeline.allocated_bytes == 180 * MIB
    assert timeline.reserved_bytes <= 200 * MIB


def test_without_a_limit_the_card_is_the_limit() -> None:
    samples = ADA.total_bytes // LARGE
    assert replay(two_blocks(), samples, ADA).failed_bytes is not None
    endless = replay(two_blocks(), samples, ADA, limit_bytes=UNLIMITED_BYTES)
    assert endless.failed_bytes is None
    assert endless.allocated_bytes > ADA.total_bytes


def fragmented() -> StepTrace:
    """30 MiB come and go, then 40 MiB are wanted."""
    made = TraceMaker()
    with made.phase("forward"):
        made.malloc("first", 30 * MIB)
        made.free("first")
        made.malloc("second", 40 * MIB)
    return made.trace()


def test_a_device_that_is_full_of_cache_is_emptied_and_tried_again() -> None:
    timeline = replay(fragmented(), 1, ADA, limit_bytes=50 * MIB)
    assert timeline.retries == 1
    assert timeline.failed_bytes is None
    assert timeline.reserved_bytes == 40 * MIB
    roomy = replay(fragmented(), 1, ADA, limit_bytes=80 * MIB)
    assert roomy.retries == 0
    assert roomy.reserved_bytes == 70 * MIB


def loaded(step: int) -> StepTrace:
    """30 MiB in half precision become 60 in fp32, before or in a step; 20 follow."""
    made = TraceMaker()
    with made.phase("setup" if step < 0 else "forward", step):
        made.malloc("halves", 30 * MIB)
        made.free("halves")
        made.malloc("weights", 60 * MIB)
    with made.phase("forward" if step < 0 else "backward", 0):
        made.malloc("x", 20 * MIB)
        made.free("x")
    return made.trace()


@pytest.mark.parametrize(("step", "fits"), [(-1, True), (0, False)])
def test_what_loading_leaves_cached_may_be_given_back(step: int, fits: bool) -> None:
    """Without a limit 90 MiB are reserved, in 80 the first 30 are given back."""
    budget = Budget(80 * MIB, 0, 0)
    recipe = Recipe(batch_size=1)
    found = judge(loaded(step), recipe, ADA, budget, context_bytes=0)
    assert found.fits is fits


def test_a_memory_fraction_limits_the_card_and_not_a_replay_without_a_limit() -> None:
    share = 100 * MIB / ADA.total_bytes
    settings = AllocatorSettings(per_process_memory_fraction=share)
    limited = replay(two_blocks(), 3, ADA, settings=settings)
    assert limited.failed_bytes is not None
    free = replay(two_blocks(), 3, ADA, limit_bytes=UNLIMITED_BYTES, settings=settings)
    assert free == replay(two_blocks(), 3, ADA, limit_bytes=UNLIMITED_BYTES)


def test_where_garbage_is_collected_more_steps_are_played() -> None:
    settings = AllocatorSettings(
        garbage_collection_threshold=0.5, per_process_memory_fraction=0.9
    )
    plain = replay(two_blocks(steps=2), 3, ADA)
    longer = replay(two_blocks(steps=2), 3, ADA, settings=settings)
    assert {point.step for point in plain.points} == {-1, 0, 1, 2}
    assert longer.points[-1].step == 1 + COLLECTING_REPEATS
    assert longer.reserved_bytes == plain.reserved_bytes  # far below half of the card


def test_rounding_counts_in_blocks_and_at_the_peak() -> None:
    settings = AllocatorSettings(roundup_power2_divisions=(1,) * 16)
    assert replay(two_blocks(), 3, ADA, settings=settings) == replay(
        two_blocks(), 3, ADA
    )
    halves = AllocatorSettings(roundup_power2_divisions=(2,) * 16)
    trace, device = two_blocks(), device_properties(ADA)
    rounded = block_bytes(trace, 3, device, halves) // MIB
    assert rounded.tolist() == [48, 24, 64, 64, 64, 48, 48]
    assert replay(trace, 3, ADA, settings=halves).allocated_bytes > 0


def test_expandable_segments_grow_where_others_are_taken_anew() -> None:
    timeline = replay(fragmented(), 1, ADA, settings=EXPANDABLE)
    assert timeline.reserved_bytes == 40 * MIB
    assert timeline.allocated_bytes == 40 * MIB


def test_a_kernels_scratch_is_the_cards_to_size() -> None:
    made = TraceMaker()
    with made.phase("forward"):
        made.scratch("workspace", "cublas_workspace", Affine(2, 0), Affine(13, 0))
        made.scratch("temporary", "buffer", Affine(MIB, LARGE))
        made.free("temporary")
    trace = made.trace()

    def sizes(gpu: str, batch_size: int) -> list[int]:
        card = device_properties(find_gpu(gpu))
        return storage_bytes(trace, batch_size, card).tolist()

    assert sizes("rtx-4090", 1) == [8_519_680, MIB + LARGE]
    assert sizes("h100-80gb", 2) == [32 * MIB, MIB + 2 * LARGE]


def test_a_trace_of_one_batch_size_is_not_stretched_to_another() -> None:
    made = TraceMaker()
    with made.phase("forward"):
        made.malloc("x", MIB)
    trace = made.trace(batch_sizes=(4,))
    assert replay(trace, 4, ADA).failed_bytes is None
    with pytest.raises(ValueError, match="holds for batch size 4 only, not for 5"):
        replay(trace, 5, ADA)


def test_blocks_are_requests_rounded_up_with_tails_too_small_to_split() -> None:
    made = TraceMaker()
    with made.phase("forward"):
        made.malloc("one byte", 1)
        made.malloc("nothing", 0)
        made.malloc("almost", 20 * MIB - 512)  # a segment of 20 MiB: 512 stay with it
    sizes = block_bytes(made.trace(), 1, device_properties(ADA))
    assert sizes.tolist() == [512, 0, 20 * MIB]
    with pytest.raises(ValueError, match="read-only"):  # others get the same array
        sizes[0] = 0


# -- laws -----------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 3 * MIB),
    st.integers(1, 40).map(lambda mib: mib * MIB),
)


class Storage(NamedTuple):
    """One storage of a random trace; it lives for so many further births."""

    fixed_bytes: int
    per_sample: int
    category: Category
    layer: int
    life: int


STORAGES = st.lists(
    st.builds(
        Storage,
        SIZES,
        SIZES,
        st.sampled_from(CATEGORIES),
        st.integers(0, 2),
        st.integers(0, 12),
    ),
    min_size=3,
    max_size=30,
)
BATCHES = st.integers(1, 4)
PHASES: tuple[PhaseName, ...] = ("forward", "backward", "optimizer")


def random_trace(storages: list[Storage], unit: int = 1) -> StepTrace:
    """A step of three phases; sizes are whole multiples of ``unit``."""
    made = TraceMaker(layers=("a", "b", "c"))
    third = -(-len(storages) // 3)
    for number, name in enumerate(PHASES):
        with made.phase(name):
            for index in range(
                number * third, min((number + 1) * third, len(storages))
            ):
                row = storages[index]
                sizes = row.fixed_bytes // unit * unit, row.per_sample // unit * unit
                made.malloc(str(index), *sizes, row.category, row.layer)
                dying = (k for k in range(index + 1) if k + storages[k].life == index)
                made.free(*map(str, dying))
    return made.trace()


def live_peak(trace: StepTrace, batch_size: int) -> int:
    """The most bytes alive, each request rounded up to 512."""
    sizes = storage_bytes(trace, batch_size, device_properties(ADA)).tolist()
    live = peak = 0
    for event in trace.events.tolist():
        size = -(-sizes[abs(event) - 1] // 512) * 512
        live += size if event > 0 else -size
        peak = max(peak, live)
    return peak


def endless(trace: StepTrace, batch_size: int) -> MemoryTimeline:
    return replay(trace, batch_size, ADA, limit_bytes=UNLIMITED_BYTES)


@given(STORAGES, BATCHES)
@settings(max_examples=60, deadline=None)
def test_allocated_is_what_lives_and_at_most_a_tail_for_each_storage(
    storages: list[Storage], batch_size: int
) -> None:
    trace = random_trace(storages)
    live = live_peak(trace, batch_size)
    tails = len(storages) * MIB  # of a large block up to 1 MiB stays unsplit
    assert live <= endless(trace, batch_size).allocated_bytes <= live + tails


@given(STORAGES, BATCHES)
@settings(max_examples=60, deadline=None)
def test_parts_add_up_to_the_peak(storages: list[Storage], batch_size: int) -> None:
    timeline = endless(random_trace(storages), batch_size)
    assert sum(timeline.at_peak_bytes.values()) == timeline.allocated_bytes
    assert sum(size for _, size in timeline.at_peak_layers) == timeline.allocated_bytes
    assert timeline.points[timeline.peak].allocated_bytes == timeline.allocated_bytes
    assert max(timeline.phase_peaks_bytes.values()) == timeline.allocated_bytes
    for point in timeline.points:
        assert point.allocated_bytes <= point.reserved_bytes
    reserved = [point.reserved_bytes for point in timeline.points]
    assert timeline.reserved_bytes == max(reserved)
    assert reserved == sorted(reserved)  # a cache that nothing empties only grows


@given(STORAGES)
@settings(max_examples=60, deadline=None)
def test_a_larger_batch_never_takes_less(storages: list[Storage]) -> None:
    # In whole 2 MiB there are no tails, and allocated is what lives.
    trace = random_trace(storages, unit=2 * MIB)
    peaks = [endless(trace, batch_size).allocated_bytes for batch_size in (1, 2, 3, 5)]
    assert all(smaller <= larger for smaller, larger in pairwise(peaks))
    assert peaks == [live_peak(trace, batch_size) for batch_size in (1, 2, 3, 5)]


@given(STORAGES, BATCHES)
@settings(max_examples=60, deadline=None)
def test_a_device_with_room_for_what_was_reserved_is_large_enough(
    storages: list[Storage], batch_size: int
) -> None:
    trace = random_trace(storages)
    free = endless(trace, batch_size)
    exact = replay(trace, batch_size, ADA, limit_bytes=free.reserved_bytes)
    assert exact == free
    if free.allocated_bytes:
        less = free.allocated_bytes - 1
        short = replay(trace, batch_size, ADA, limit_bytes=less)
        assert short.failed_bytes is not None
        assert short.reserved_bytes <= less


@given(STORAGES, BATCHES)
@settings(max_examples=40, deadline=None)
def test_expandable_segments_change_no_more_than_tails(
    storages: list[Storage], batch_size: int
) -> None:
    trace = random_trace(storages)
    timeline = replay(
        trace, batch_size, ADA, limit_bytes=UNLIMITED_BYTES, settings=EXPANDABLE
    )
    live = live_peak(trace, batch_size)
    assert live <= timeline.allocated_bytes <= live + len(storages) * MIB
