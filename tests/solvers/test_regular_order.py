import pytest

from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.problem import Problem, Solution, describe, wrapped_count
from budgetfit.solvers.regular_order import in_regular_order
from tests.solvers.chains import block, chain_of, equal_blocks, option, seeded, single
from tests.solvers.exhaustive import segments_from

KEEP = option("keep", saved=17, forward=18, backward=0)
RECOMPUTE = option("recompute", saved=1, forward=2, backward=17, extra=9)
SELECTIVE = option("selective", 6, 7, 14, extra=4, saved_ops=("aten.mm.default:0",))
CHAIN = chain_of(*equal_blocks(8, KEEP, RECOMPUTE, SELECTIVE))
ROOM = 1000


def solution(*segments: Segment) -> Solution:
    names = {name for each in segments for name in each.blocks}
    known = {block.name for block in CHAIN.blocks}
    plan = describe(CHAIN, segments) if names <= known else "A plan"
    text = f"{plan}; the fastest."
    return Solution(segments=segments, proven_optimal=True, explanation=text)


def of(length: int, *starts: int) -> tuple[Segment, ...]:
    return tuple(
        Segment(tuple(f"layers.{number}" for number in range(at, at + length)))
        for at in starts
    )


def selective(*numbers: int) -> tuple[Segment, ...]:
    return tuple(
        Segment((f"layers.{number}",), "selective", ("aten.mm.default:0",))
        for number in numbers
    )


@pytest.mark.parametrize(
    ("given", "ordered"),
    [
        (single(0, 3, 6), single(0, 1, 2)),
        ((*single(7), *of(2, 1), *of(3, 4)), single(*range(6))),
        ((*selective(0, 4), *single(2, 6)), (*single(0, 1), *selective(2, 3))),
    ],
)
def test_equal_blocks_are_put_in_order(
    given: tuple[Segment, ...], ordered: tuple[Segment, ...]
) -> None:
    found = in_regular_order(Problem(chain=CHAIN, limit_bytes=ROOM), solution(*given))
    assert set(found.segments or ()) == set(ordered)
    assert describe(CHAIN, found.segments or ()) in found.explanation


def test_long_segments_stay_where_single_blocks_hold_too_much() -> None:
    chain = chain_of(*equal_blocks(48, KEEP, RECOMPUTE))
    given = solution(*of(3, 0, 45), *of(2, *range(3, 45, 2)))
    singles = chain_peak_bytes(chain, single(*range(48)))
    for limit, length in ((singles - 1, 2), (singles, 1)):
        problem = Problem(chain=chain, limit_bytes=limit)
        found = in_regular_order(problem, given).segments or ()
        assert {len(each.blocks) for each in found} == {length}


def test_nothing_changes_beyond_the_limit() -> None:
    given = solution(*single(0, 3, 6))
    found = in_regular_order(Problem(chain=CHAIN, limit_bytes=0), given)
    assert found is given


def test_blocks_that_differ_stay_as_they_are() -> None:
    slow = option("recompute", saved=1, forward=2, backward=17, extra=10)
    other = block("layers.8", KEEP, slow)
    chain = chain_of(*CHAIN.blocks, other)
    given = solution(*single(1, 5, 8))
    found = in_regular_order(Problem(chain=chain, limit_bytes=ROOM), given)
    assert found.segments == single(0, 1, 8)


def test_a_segment_that_spans_other_blocks_stays() -> None:
    slow = option("recompute", saved=1, forward=2, backward=17, extra=10)
    chain = chain_of(*CHAIN.blocks, block("layers.8", KEEP, slow))
    given = solution(*single(1, 4), *of(2, 7))
    problem = Problem(chain=chain, limit_bytes=ROOM)
    assert in_regular_order(problem, given) is given


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_in_order_takes_no_longer_fits_and_is_its_own_order(seed: int) -> None:
    rnd = seeded(seed)
    sizes = [rnd.randint(0, 20) for _ in range(6)]
    chain = chain_of(
        *equal_blocks(
            rnd.randint(4, 10),
            option("keep", sizes[0] + 2, sizes[1], sizes[2]),
            option("recompute", 1, sizes[3], sizes[4], extra=rnd.randint(0, 9)),
            option("recompute", 0, 2, sizes[5], extra=1, input_on_host=True),
            gradient=rnd.randint(0, 3),
        ),
        block("head", KEEP),
    )
    problem = Problem(chain=chain, limit_bytes=0, max_segment=4, nested=True)
    segments: list[Segment] = []
    at = 0
    while at < len(chain.blocks):
        choices = list(segments_from(problem, at))
        if choices and rnd.random() < 0.7:
            segments.append(rnd.choice(choices))
            at += len(segments[-1].blocks)
        else:
            at += 1
    limit = chain_peak_bytes(chain, segments) + rnd.randint(0, 10)
    problem = Problem(chain=chain, limit_bytes=limit)
    found = in_regular_order(problem, solution(*segments))
    assert found.segments is not None
    assert chain_peak_bytes(chain, found.segments) <= limit
    assert chain_time_ns(chain, found.segments) <= chain_time_ns(chain, segments)
    assert wrapped_count(found.segments) == wrapped_count(segments)
    assert in_regular_order(problem, found).segments == found.segments
