from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.transitions import incoming_bytes
from tests.solvers.chains import (
    chain_of,
    chain_steps,
    equal_blocks,
    option,
    random_chain,
    seeded,
)
from tests.solvers.exhaustive import all_plans, segments_from

KEEP = option("keep", saved=10, forward=14, backward=3)
RECOMPUTE = option("recompute", saved=1, forward=5, backward=12, extra=4)


def test_steps_put_together_are_the_chain_formula() -> None:
    rnd = seeded(3)
    for _ in range(150):
        others = rnd.choice([0, 1, 2])
        chain = random_chain(rnd, rnd.randint(1, 5 - others), most_others=others)
        problem = Problem(chain=chain, limit_bytes=0, nested=others > 0)
        steps = chain_steps(problem)
        gradients = sum(each.gradient_bytes for each in chain.blocks)
        plain_ns = sum(each.forward_ns + each.backward_ns for each in chain.blocks)
        for plan in all_plans(problem):
            at = {segment.blocks[0]: segment for segment in plan}
            prefix, cached, time_ns, start = chain.static_bytes, 0, plain_ns, 0
            peak = prefix + gradients + chain.optimizer_bytes
            while start < len(chain.blocks):
                wanted = at.get(chain.blocks[start].name)
                step = next(o for o in steps[start] if o.segment(chain) == wanted)
                peak = max(
                    peak,
                    prefix + cached + step.forward_bytes,
                    prefix + step.backward_bytes,
                )
                prefix += step.saved_bytes
                cached += step.cached_bytes
                time_ns += step.extra_ns
                start = step.stop
            assert peak == chain_peak_bytes(chain, plan)
            assert time_ns == chain_time_ns(chain, plan)


def test_ever_longer_segments_come_before_keeping() -> None:
    chain = chain_of(*equal_blocks(3, KEEP, RECOMPUTE))
    steps = chain_steps(Problem(chain=chain, limit_bytes=0))
    assert [[step.wrapped for step in row] for row in steps] == [
        [1, 2, 3, 0],
        [1, 2, 0],
        [1, 0],
    ]
    assert [[step.stop for step in row] for row in steps] == [
        [1, 2, 3, 1],
        [2, 3, 2],
        [3, 3],
    ]


def test_every_option_and_kind_of_segment_comes_in_index_order() -> None:
    ops = ("aten.mm.default:0",)
    less = option("selective", saved=4, forward=9, backward=11, saved_ops=ops)
    on_host = option("recompute", 0, 5, 12, input_on_host=True)
    offload = option("offload", saved=0, forward=14, backward=13)
    chain = chain_of(*equal_blocks(2, KEEP, less, RECOMPUTE, offload, on_host))
    problem = Problem(chain=chain, limit_bytes=0, nested=True)
    first, both = ("layers.0",), ("layers.0", "layers.1")
    assert [step.segment(chain) for step in chain_steps(problem)[0]] == [
        Segment(first, mode="selective", saved_ops=ops),
        Segment(first),
        Segment(first, mode="offload"),
        Segment(first, input_on_host=True),
        Segment(both),
        Segment(both, input_on_host=True),
        Segment(both, nested=True),
        Segment(both, nested=True, input_on_host=True),
        None,
    ]
    for start in (0, 1):
        *wrapped, kept = (o.segment(chain) for o in chain_steps(problem)[start])
        assert wrapped == list(segments_from(problem, start))
        assert kept is None


def test_incoming_is_the_output_gradient_and_all_later_weight_gradients() -> None:
    chain = chain_of(*equal_blocks(3, KEEP, gradient=5, output=7))
    assert incoming_bytes(chain) == [7 + 10, 7 + 5, 0]
    assert incoming_bytes(chain_of(*equal_blocks(1, KEEP, gradient=5))) == [0]
