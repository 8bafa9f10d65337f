import pytest

from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.solvers.problem import (
    Problem,
    describe,
    longest_segment,
    segment,
    single_segment,
    wrapped_count,
)
from tests.solvers.chains import block, chain_of, equal_blocks, option, single

KEEP = option("keep", saved=20, forward=24, backward=4)
RECOMPUTE = option("recompute", saved=1, forward=16, backward=23, extra=1)
MIXED = chain_of(
    block("<prologue>", KEEP),
    block("layers.0", KEEP, RECOMPUTE),
    block("layers.1", KEEP, RECOMPUTE),
    block("layers.2", KEEP, RECOMPUTE, joins_next=False),
    block("layers.3", KEEP, RECOMPUTE),
    block("<epilogue>", KEEP),
)


@pytest.mark.parametrize(
    ("limit", "lengths"),
    [(None, [0, 3, 2, 1, 1, 0]), (2, [0, 2, 2, 1, 1, 0]), (1, [0, 1, 1, 1, 1, 0])],
)
def test_segments_are_as_long_as_blocks_join_and_the_limit_allows(
    limit: int | None, lengths: list[int]
) -> None:
    assert [longest_segment(MIXED, start, limit) for start in range(6)] == lengths
    problem = Problem(chain=MIXED, limit_bytes=0, max_segment=limit)
    assert [problem.longest_segment(start) for start in range(6)] == lengths


def test_a_segment_of_no_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="max_segment is the most blocks in one"):
        Problem(chain=MIXED, limit_bytes=0, max_segment=0)


def test_a_segment_is_named_by_its_blocks() -> None:
    assert segment(MIXED, 1, 2) == Segment(("layers.0", "layers.1"))


def test_wrapped_blocks_are_counted_in_all_segments() -> None:
    assert wrapped_count([segment(MIXED, 1, 2), segment(MIXED, 4, 1)]) == 3


def test_a_plan_is_described_in_plain_words() -> None:
    assert describe(MIXED, ()) == "All 4 blocks are kept"
    assert describe(MIXED, [segment(MIXED, 1, 1)]) == (
        "1 of 4 blocks is recomputed, in 1 segment of 1"
    )
    assert describe(MIXED, [segment(MIXED, 1, 2), segment(MIXED, 4, 1)]) == (
        "3 of 4 blocks are recomputed, in 2 segments of 1 to 2"
    )
    equal = chain_of(*equal_blocks(3, KEEP, RECOMPUTE))
    assert describe(equal, single(0, 1)) == (
        "2 of 3 blocks are recomputed, in 2 segments of 1"
    )


def test_a_plan_of_every_kind_is_described() -> None:
    one = ("aten.mm.default:0",)
    less = option("selective", 4, 9, 11, saved_ops=one)
    offload = option("offload", 0, 9, 11)
    on_host = option("recompute", 0, 9, 11, input_on_host=True)
    chain = chain_of(*equal_blocks(6, KEEP, RECOMPUTE, less, offload, on_host))
    plan = [
        segment(chain, 0, 2, nested=True, input_on_host=True),
        segment(chain, 2, 1),
        single_segment(chain.blocks[3], less),
        single_segment(chain.blocks[4], offload),
    ]
    assert describe(chain, plan) == (
        "3 of 6 blocks are recomputed, in 2 segments of 1 to 2 "
        "(1 nested, 1 with inputs on the host); "
        "1 is recomputed but for some ops' outputs; 1 is offloaded to the host"
    )
    assert describe(chain, plan[3:]) == "1 of 6 blocks is offloaded to the host"
    assert plan[2] == Segment(("layers.3",), mode="selective", saved_ops=one)


def test_a_kept_block_is_no_segment() -> None:
    with pytest.raises(InputError, match="is kept without a segment: leave it out"):
        single_segment(MIXED.blocks[1], KEEP)
