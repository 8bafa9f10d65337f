from collections.abc import Sequence

import pytest

from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.solvers.chain_dp import lowest_peak
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.uniform_segments import (
    best_uniform_segments,
    chen_segments,
    every_uniform_length,
    fastest_uniform,
    uniform_segments,
)
from tests.solvers.chains import block, chain_of, equal_blocks, option, single

# A transformer block in units of its input: 17 saved, no other transients.
KEEP = option("keep", saved=17, forward=18, backward=0)
RECOMPUTE = option("recompute", saved=1, forward=2, backward=17, extra=1)


def transformer(count: int) -> ChainProfile:
    return chain_of(*equal_blocks(count, KEEP, RECOMPUTE))


def lengths(plan: Sequence[Segment]) -> list[int]:
    return [len(segment.blocks) for segment in plan]


# solver-facts 4.6. With segments of k blocks: ceil(n / k) inputs, k - 1 times 17 and 18
# of the segment that is recomputed, less the input that it shares, and one gradient.
@pytest.mark.parametrize(
    ("count", "keep_all", "one_block", "best", "best_peak", "chen", "chen_peak"),
    [
        (24, 409, 41, 1, 41, 5, 90),
        (48, 817, 65, 2, 58, 7, 126),
        (80, 1361, 97, 2, 74, 9, 162),
        (126, 2143, 143, 3, 93, 12, 215),
    ],
)
def test_sqrt_n_is_a_trap_for_transformer_blocks(
    count: int,
    keep_all: int,
    one_block: int,
    best: int,
    best_peak: int,
    chen: int,
    chen_peak: int,
) -> None:
    chain = transformer(count)
    assert chain_peak_bytes(chain, ()) == keep_all
    assert chain_peak_bytes(chain, uniform_segments(chain, 1)) == one_block
    plan = best_uniform_segments(Problem(chain=chain, limit_bytes=0))
    assert max(lengths(plan)) == best
    assert chain_peak_bytes(chain, plan) == best_peak
    assert max(lengths(chen_segments(chain))) == chen
    assert chain_peak_bytes(chain, chen_segments(chain)) == chen_peak


def test_126_blocks_in_segments_of_11() -> None:
    # Where sqrt(126) = 11.2 is rounded to the nearest.
    chain = transformer(126)
    assert chain_peak_bytes(chain, uniform_segments(chain, 11)) == 199


def test_solving_is_never_above_the_best_uniform_length() -> None:
    for count in (7, 24, 48):
        chain = transformer(count)
        problem = Problem(chain=chain, limit_bytes=10**6, max_segment=8)
        uniform = chain_peak_bytes(chain, best_uniform_segments(problem))
        assert chain_peak_bytes(chain, lowest_peak(problem).segments) <= uniform


def test_where_blocks_save_what_they_are_given_sqrt_n_pays() -> None:
    # Chen's own setting: every layer saves one tensor as large as its input.
    keep = option("keep", saved=1, forward=2, backward=0)
    recompute = option("recompute", saved=1, forward=2, backward=1, extra=1)
    chain = chain_of(*equal_blocks(100, keep, recompute))
    assert lengths(chen_segments(chain)) == [10] * 10
    peak = chain_peak_bytes(chain, chen_segments(chain))
    assert peak < chain_peak_bytes(chain, ()) / 4
    assert peak <= chain_peak_bytes(chain, uniform_segments(chain, 1))


def test_the_last_segment_is_what_remains() -> None:
    assert lengths(uniform_segments(transformer(7), 3)) == [3, 3, 1]
    assert uniform_segments(transformer(3), 1) == single(0, 1, 2)


def test_segments_end_before_pinned_blocks_and_where_blocks_do_not_join() -> None:
    blocks = [
        block("<prologue>", KEEP),
        block("encoder.0", KEEP, RECOMPUTE),
        block("encoder.1", KEEP, RECOMPUTE),
        block("encoder.2", KEEP, RECOMPUTE, joins_next=False),
        block("decoder.0", KEEP, RECOMPUTE),
        block("decoder.1", KEEP, RECOMPUTE),
        block("<epilogue>", KEEP),
    ]
    assert uniform_segments(chain_of(*blocks), 2) == (
        Segment(("encoder.0", "encoder.1")),
        Segment(("encoder.2",)),
        Segment(("decoder.0", "decoder.1")),
    )
    # ceil(sqrt(5)) = 3: n counts the blocks that can be wrapped.
    assert lengths(chen_segments(chain_of(*blocks))) == [3, 2]


def test_a_chain_of_pinned_blocks_has_nothing_to_segment() -> None:
    chain = chain_of(*equal_blocks(3, KEEP))
    problem = Problem(chain=chain, limit_bytes=10**6)
    assert chen_segments(chain) == ()
    assert list(every_uniform_length(problem)) == []
    assert best_uniform_segments(problem) == ()
    assert fastest_uniform(problem).segments == ()


def test_every_length_up_to_the_longest_possible_is_offered() -> None:
    chain = transformer(6)
    problem = Problem(chain=chain, limit_bytes=0)
    assert [length for length, _ in every_uniform_length(problem)] == [1, 2, 3, 4, 5, 6]
    short = Problem(chain=chain, limit_bytes=0, max_segment=2)
    assert [length for length, _ in every_uniform_length(short)] == [1, 2]


def test_the_fastest_uniform_plan_keeps_everything_where_that_fits() -> None:
    chain = transformer(24)
    assert fastest_uniform(Problem(chain=chain, limit_bytes=409)).segments == ()
    found = fastest_uniform(Problem(chain=chain, limit_bytes=408))
    # All lengths take the same time: the lowest peak decides.
    assert found.segments == uniform_segments(chain, 1)
    assert not found.proven_optimal
    assert found.explanation == (
        "24 of 24 blocks are recomputed, in 24 segments of 1; "
        "the fastest single segment length."
    )
    none = fastest_uniform(Problem(chain=chain, limit_bytes=40))
    assert none.segments is None
    assert none.explanation == "No single segment length is within the budget."
