"""What a block costs, read off traces that were written by hand."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest

from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.core.step_trace import StepTrace
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.live_bytes import LiveBytes
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_points
from budgetfit.memory.chain.profile import Measure, chain_profile, profile_on_line
from budgetfit.memory.chain.stages import (
    EPILOGUE,
    PROLOGUE,
    MeasuredChain,
    OptionTrace,
    TimesOf,
    stages,
    steady_micro_step,
)
from budgetfit.memory.replay import device_properties, replay
from tests.memory.made_traces import MIB, TraceMaker

ADA = find_gpu("rtx-4090")
CARD = device_properties(ADA)
# All sizes are even numbers of MiB, at batch 1: the allocator leaves no tails.
SAVED = (12, 14, 6)
HIDDEN = (10, 10, 8, 4)  # the prologue's output, and each block's
WEIGHT = 4


def chain_trace(
    segments: Sequence[Sequence[int]] = (), weights: bool = True
) -> StepTrace:
    """Three blocks that save their input and one more tensor.

    ``segments`` are recomputed. Each block has a temporary of 6 MiB forward and 8 MiB
    backward and a weight of 4 MiB.
    """
    made = TraceMaker("a", "b", "c")
    inside = {block: tuple(part) for part in segments for block in part}
    with made.phase("setup", -1):
        made.malloc("w", 3 * WEIGHT * MIB, category="parameters")
    with made.phase("forward"):
        made.malloc("batch", 2 * MIB, category="batch")
        made.malloc("x0", per_sample=HIDDEN[0] * MIB)
        for block in range(3):
            with made.block(block, "forward", takes=f"x{block}", gives=f"x{block + 1}"):
                _forward(made, block, f"x{block + 1}", f"s{block}")
                if block in inside:
                    made.free(f"s{block}")
                    if block != inside[block][0]:
                        made.free(f"x{block}")
        made.malloc("logits", per_sample=2 * MIB)
        made.free("x3")
    with made.phase("backward"):
        made.malloc("g3", per_sample=HIDDEN[3] * MIB)
        made.free("logits")
        for block in (2, 1, 0):
            with made.block(block, "backward"):
                part = inside.get(block, ())
                if part and block == part[-1]:
                    _recompute(made, part)
                _backward(made, block, weights=weights)
        made.free("g0")
    with made.phase("optimizer"):
        made.malloc("m", 3 * WEIGHT * MIB, category="optimizer_state")
        made.free("batch", *(f"gw{block}" for block in range(3) if weights))
    return made.trace()


def _forward(made: TraceMaker, block: int, output: str, saved: str) -> None:
    made.malloc(f"t {saved}", per_sample=6 * MIB)
    made.malloc(saved, per_sample=SAVED[block] * MIB)
    made.free(f"t {saved}")
    if output:
        made.malloc(output, per_sample=HIDDEN[block + 1] * MIB)


def _recompute(made: TraceMaker, part: tuple[int, ...]) -> None:
    """Run forward again, up to the last tensor that is needed."""
    for block in part:
        _forward(made, block, f"x{block + 1}" if block != part[-1] else "", f"s{block}")


def _backward(made: TraceMaker, block: int, *, weights: bool) -> None:
    made.malloc(f"gt{block}", per_sample=8 * MIB)
    made.free(f"s{block}")
    if weights:
        made.malloc(f"gw{block}", WEIGHT * MIB, category="gradients")
    made.malloc(f"g{block}", per_sample=HIDDEN[block] * MIB)
    made.free(f"gt{block}", f"g{block + 1}", f"x{block}")


EVERY = ((0,), (1,), (2,))
EACH = tuple(Segment((name,)) for name in "abc")


def recomputed() -> OptionTrace:
    return OptionTrace(chain_trace(EVERY), EACH)


def measured_at(batch_size: int, times_of: TimesOf | None = None) -> Measure:
    return partial(
        MeasuredChain.of, batch_size=batch_size, device=CARD, times_of=times_of
    )


@pytest.fixture(scope="module")
def chain() -> ChainProfile:
    return chain_profile(chain_trace(), recomputed(), measured_at(1))


def test_what_runs_around_the_blocks_becomes_stations_of_its_own() -> None:
    found = stages(LiveBytes.of(chain_trace(), 1, CARD))
    assert [row.name for row in found] == [PROLOGUE, "a", "b", "c", EPILOGUE]
    assert [row.block for row in found] == [-1, 0, 1, 2, -1]
    edges = [row.forward for row in found]
    assert [end for _, end in edges[:-1]] == [start for start, _ in edges[1:]]
    assert [row.joins_next for row in found] == [False, True, True, False, False]


def mib(chain: ChainProfile, block: int, mode: str) -> tuple[int, ...]:
    """S, f, b of one block's option, in MiB."""
    option = next(o for o in chain.blocks[block].options if o.mode == mode)
    sizes = option.saved_bytes, option.forward_bytes, option.backward_bytes
    assert not any(size % MIB for size in sizes)
    return tuple(size // MIB for size in sizes)


def test_a_kept_block_saves_its_input_and_what_it_made(chain: ChainProfile) -> None:
    # S: x0 10 + s0 12. f: those and x1 10. b: temporary 8, weight gradient 4 and
    # gradient 10, but s0 12 is gone when they are all there.
    assert mib(chain, 1, "keep") == (22, 32, 10)
    assert mib(chain, 2, "keep") == (24, 32, 8)  # x1 10 + s1 14; x2 8; 8 + 4 + 10 - 14
    assert mib(chain, 3, "keep") == (14, 20, 14)  # x2 8 + s2 6; and t2 6; 8 + 4 + 8 - 6


def test_a_recomputed_block_saves_its_input(chain: ChainProfile) -> None:
    # S: x0. f: as kept. b: s0 again 12 and with it the same as kept, b + s0.
    assert mib(chain, 1, "recompute") == (10, 32, 10 + 12)
    assert mib(chain, 2, "recompute") == (10, 32, 8 + 14)
    assert mib(chain, 3, "recompute") == (8, 20, 14 + 6)


def test_prologue_and_epilogue_can_only_be_kept(chain: ChainProfile) -> None:
    assert [option.mode for option in chain.blocks[0].options] == ["keep"]
    assert mib(chain, 0, "keep") == (2, 12, 0)  # the batch; and x0
    assert [option.mode for option in chain.blocks[4].options] == ["keep"]
    assert mib(chain, 4, "keep") == (2, 6, 4)  # logits; x3 4; a gradient of x3


def test_static_gradients_outputs_and_the_optimizer(chain: ChainProfile) -> None:
    assert chain.static_bytes == 12 * MIB
    assert [block.gradient_bytes // MIB for block in chain.blocks] == [0, 4, 4, 4, 0]
    assert [block.output_bytes // MIB for block in chain.blocks] == [10, 10, 8, 4, 0]
    assert chain.optimizer_bytes == 14 * MIB  # states 12, the batch 2


PLANS = [
    *(
        tuple((block,) for block in chosen)
        for count in range(4)
        for chosen in combinations(range(3), count)
    ),
    ((0, 1),),
    ((1, 2),),
    ((0, 1), (2,)),
    ((0,), (1, 2)),
    ((0, 1, 2),),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_formula_is_the_judge_for_every_segmentation(
    plan: tuple[tuple[int, ...], ...], batch_size: int
) -> None:
    profile = chain_profile(chain_trace(), recomputed(), measured_at(batch_size))
    names = ("a", "b", "c")
    segments = [Segment(tuple(names[block] for block in part)) for part in plan]
    judged = replay(chain_trace(plan), batch_size, ADA).allocated_bytes
    assert chain_peak_bytes(profile, segments) == judged


def test_without_a_recomputed_trace_everything_is_kept() -> None:
    profile = chain_profile(chain_trace(), None, measured_at(1))
    assert [len(block.options) for block in profile.blocks] == [1] * 5
    judged = replay(chain_trace(), 1, ADA).allocated_bytes
    assert chain_peak_bytes(profile, ()) == judged


def test_times_are_those_of_the_stations() -> None:
    profile = chain_profile(
        chain_trace(),
        recomputed(),
        measured_at(
            1,
            lambda probe, found: [
                (10 * k, 20 * k + 10 * k * len(probe.segments) // 3)
                for k in range(len(found))
            ],
        ),
        optimizer_ns=7,
    )
    assert [block.forward_ns for block in profile.blocks] == [0, 10, 20, 30, 40]
    assert [block.backward_ns for block in profile.blocks] == [0, 20, 40, 60, 80]
    # Recomputing runs forward once more.
    assert [block.options[-1].extra_ns for block in profile.blocks[1:4]] == [10, 20, 30]
    assert profile.optimizer_ns == 7


def test_a_frozen_chain_has_no_gradients() -> None:
    profile = chain_profile(chain_trace(weights=False), None, measured_at(1))
    assert not any(block.gradient_bytes for block in profile.blocks)


def between(*, frees_only: bool) -> StepTrace:
    """Two blocks; between them something dies, or something is made as well."""
    made = TraceMaker("a", "b")
    with made.phase("forward"):
        made.malloc("x0", 2 * MIB)
        with made.block(0, "forward", takes="x0", gives="x1"):
            made.malloc("x1", 2 * MIB)
        made.free("x0")
        if not frees_only:
            made.malloc("mask", 4 * MIB)
        with made.block(1, "forward", takes="x1", gives="x2"):
            made.malloc("x2", 2 * MIB)
    with made.phase("backward"):
        with made.block(1, "backward"):
            made.malloc("g1", 2 * MIB)
            made.free("x2")
        with made.block(0, "backward"):
            made.free("x1", "g1")
    return made.trace()


def test_a_hidden_state_that_dies_between_blocks_does_not_part_them() -> None:
    found = stages(LiveBytes.of(between(frees_only=True), 1, CARD))
    assert [row.name for row in found] == [PROLOGUE, "a", "b", EPILOGUE]
    assert found[1].joins_next
    assert found[1].forward[1] == found[2].forward[0]


def test_blocks_that_follow_each_other_may_still_not_be_joined() -> None:
    # The second one's input is a view of the first one's output, say.
    trace = replace(between(frees_only=True), joined=(False, False))
    assert not stages(LiveBytes.of(trace, 1, CARD))[1].joins_next


def test_what_recomputing_changes_elsewhere_counts_for_every_plan() -> None:
    def with_extra(mib: int) -> StepTrace:
        made = TraceMaker("a")
        with made.phase("setup", -1):
            made.malloc("w", (4 + mib) * MIB)
        with made.phase("forward"):
            made.malloc("x", (2 + mib) * MIB)
            with made.block(0, "forward", takes="x", gives="y"):
                made.malloc("y", 2 * MIB)
        with made.phase("backward"), made.block(0, "backward"):
            made.free("x", "y")
        return made.trace()

    profile = chain_profile(
        with_extra(0), OptionTrace(with_extra(6), EACH), measured_at(1)
    )
    assert profile.static_bytes == 10 * MIB
    assert profile.blocks[0].keep.forward_bytes == 8 * MIB


def test_what_is_made_between_blocks_is_a_station_that_parts_them() -> None:
    found = stages(LiveBytes.of(between(frees_only=False), 1, CARD))
    assert [row.name for row in found] == [PROLOGUE, "a", "<between>1", "b", EPILOGUE]
    assert not found[1].joins_next
    profile = chain_profile(between(frees_only=False), None, measured_at(1))
    judged = replay(between(frees_only=False), 1, ADA).allocated_bytes
    assert chain_peak_bytes(profile, ()) == judged


def test_copies_that_live_to_the_end_of_the_forward_are_cached_and_not_saved() -> None:
    made = TraceMaker("a", "b")
    with made.phase("forward"):
        for block in range(2):
            with made.block(block, "forward"):
                made.malloc(f"copy {block}", 6 * MIB)
                made.malloc(f"s{block}", 2 * MIB)
        made.free("copy 0", "copy 1")
    with made.phase("backward"):
        for block in (1, 0):
            with made.block(block, "backward"):
                made.free(f"s{block}")
    profile = chain_profile(made.trace(), None, measured_at(1))
    kept = [block.keep for block in profile.blocks[:2]]
    assert [option.cached_bytes // MIB for option in kept] == [6, 6]
    assert [option.saved_bytes // MIB for option in kept] == [2, 2]
    peaks = {point.label: point.bytes // MIB for point in chain_points(profile, ())}
    assert peaks["forward b"] == 16  # both copies, both saved
    assert peaks["backward b"] == 4  # the copies are gone


def test_only_the_last_micro_step_counts() -> None:
    made = TraceMaker("a")
    for step, micro_step, size in ((0, 0, 2), (0, 1, 4), (1, 0, 6), (1, 1, 8)):
        key = f"{step}{micro_step}"
        now = step, micro_step
        with made.phase("forward", *now), made.block(0, "forward", *now):
            made.malloc(f"s{key}", size * MIB)
        with made.phase("backward", *now), made.block(0, "backward", *now):
            made.free(f"s{key}")
    trace = made.trace()
    assert steady_micro_step(trace) == (1, 1)
    profile = chain_profile(trace, None, measured_at(1))
    assert profile.blocks[0].keep.saved_bytes == 8 * MIB


def test_a_profile_on_the_line_through_two_others_is_what_it_measures_there() -> None:
    # The sizes of this trace are affine in the batch size.
    kept, recomputed = chain_trace(), OptionTrace(chain_trace(EVERY), EACH)
    low, high, far = (
        chain_profile(kept, recomputed, measured_at(n)) for n in (2, 3, 9)
    )
    line = profile_on_line(low, high, 9)
    assert line is not None
    assert replace(line, blocks=()).__repr__() == replace(far, blocks=()).__repr__()
    assert line.blocks == far.blocks
    for size in (2, 40):
        found = profile_on_line(low, high, size)
        assert found is not None
        measured = chain_profile(kept, recomputed, measured_at(size))
        assert found.blocks == measured.blocks


def test_there_is_no_line_through_profiles_with_other_options() -> None:
    kept = chain_trace()
    plain, more = (
        chain_profile(kept, None, measured_at(2)),
        OptionTrace(chain_trace(EVERY), EACH),
    )
    assert profile_on_line(plain, chain_profile(kept, more, measured_at(3)), 9) is None
