from budgetfit.core.recipe import Segment
from budgetfit.solvers.problem import Problem
from tests.solvers.chains import (
    block,
    chain_of,
    equal_blocks,
    option,
    random_chain,
    seeded,
    single,
)
from tests.solvers.exhaustive import all_plans, count_plans, exhaustive

KEEP = option("keep", saved=20, forward=24, backward=4)
RECOMPUTE = option("recompute", saved=1, forward=16, backward=23, extra=1)


def test_all_plans_of_two_blocks() -> None:
    chain = chain_of(*equal_blocks(2, KEEP, RECOMPUTE))
    assert list(all_plans(Problem(chain=chain, limit_bytes=0))) == [
        single(0, 1),
        single(0),
        (Segment(("layers.0", "layers.1")),),
        single(1),
        (),
    ]


def test_segments_stop_at_blocks_that_cannot_be_wrapped_or_joined() -> None:
    blocks = [
        block("a", KEEP, RECOMPUTE),
        block("b", KEEP, RECOMPUTE, joins_next=False),
        block("c", KEEP, RECOMPUTE),
        block("d", KEEP),
    ]
    plans = all_plans(Problem(chain=chain_of(*blocks), limit_bytes=0))
    longer = {each.blocks for plan in plans for each in plan if len(each.blocks) > 1}
    assert longer == {("a", "b")}


def test_plans_are_counted_without_being_made() -> None:
    rnd = seeded(0)
    for max_segment in (1, 2, None):
        for _ in range(20):
            problem = Problem(
                chain=random_chain(rnd, rnd.randint(1, 6)),
                limit_bytes=0,
                max_segment=max_segment,
            )
            assert count_plans(problem) == len(list(all_plans(problem)))


def test_too_many_plans_are_not_tried() -> None:
    chain = chain_of(*equal_blocks(30, KEEP, RECOMPUTE))
    found = exhaustive(Problem(chain=chain, limit_bytes=10**9, max_segment=1))
    assert found.segments is None
    assert not found.proven_optimal
    assert found.explanation == "1,073,741,824 plans are too many to try all of them."


def test_it_says_that_it_tried_everything() -> None:
    chain = chain_of(*equal_blocks(2, KEEP, RECOMPUTE))
    found = exhaustive(Problem(chain=chain, limit_bytes=1000))
    assert found.explanation == "All 2 blocks are kept; all 5 plans were tried."
    none = exhaustive(Problem(chain=chain, limit_bytes=1))
    assert none.proven_optimal
    assert none.explanation == "None of all 5 plans is within the budget."
