"""Chains for the tests of the formula and of the solvers, in whole small numbers."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile, Mode
from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.labels import segments_from_steps
from budgetfit.solvers.problem import Problem, Solution, wrapped_count
from budgetfit.solvers.transitions import ChainStep, incoming_bytes, steps_from
from tests.solvers.exhaustive import all_plans

# What a block can be besides kept and recomputed: mode, saved ops, input on the host.
OTHERS: Final[list[tuple[Mode, tuple[str, ...], bool]]] = [
    ("selective", ("aten.mm.default:0",), False),
    ("selective", ("aten.mm.default:0", "aten.bmm.default:1"), False),
    ("offload", (), False),
    ("recompute", (), True),
]


def chain_steps(problem: Problem) -> list[list[ChainStep]]:
    """The steps that start at each block, with none dropped."""
    incoming = incoming_bytes(problem.chain)
    blocks = range(len(problem.chain.blocks))
    return [steps_from(problem, start, incoming[start:]) for start in blocks]


def seeded(seed: int) -> random.Random:
    """The same numbers in every run."""
    return random.Random(seed)


def option(
    mode: Mode,
    /,
    saved: int,
    forward: int,
    backward: int,
    *,
    cached: int = 0,
    extra: int = 0,
    saved_ops: tuple[str, ...] = (),
    input_on_host: bool = False,
) -> BlockOption:
    return BlockOption(
        mode=mode,
        saved_bytes=saved,
        forward_bytes=forward,
        backward_bytes=backward,
        cached_bytes=cached,
        extra_ns=extra,
        saved_ops=saved_ops,
        input_on_host=input_on_host,
    )


def block(
    name: str,
    *options: BlockOption,
    gradient: int = 0,
    output: int = 1,
    joins_next: bool = True,
) -> BlockProfile:
    return BlockProfile(
        name=name,
        options=options,
        gradient_bytes=gradient,
        output_bytes=output,
        forward_ns=10,
        backward_ns=20,
        joins_next=joins_next,
    )


def chain_of(
    *blocks: BlockProfile,
    static: int = 0,
    input_bytes: int = 1,
    optimizer: int = 0,
    optimizer_ns: int = 0,
) -> ChainProfile:
    return ChainProfile(
        batch_size=1,
        static_bytes=static,
        input_bytes=input_bytes,
        optimizer_bytes=optimizer,
        optimizer_ns=optimizer_ns,
        blocks=blocks,
    )


def equal_blocks(
    count: int, *options: BlockOption, gradient: int = 0, output: int = 1
) -> list[BlockProfile]:
    return [
        block(f"layers.{number}", *options, gradient=gradient, output=output)
        for number in range(count)
    ]


def single(*numbers: int) -> tuple[Segment, ...]:
    """One segment of one block each, of the blocks that ``equal_blocks`` names."""
    return tuple(Segment((f"layers.{number}",)) for number in numbers)


def random_chain(
    rnd: random.Random, length: int, *, costly: bool = False, most_others: int = 0
) -> ChainProfile:
    """Small integers: ties, zero sizes and equal costs are common.

    ``costly``: recomputing always takes time, as on a real card. ``most_others``: most
    options of a block besides keeping and recomputing it.
    """
    zero_sizes, equal_costs = rnd.random() < 0.2, rnd.random() < 0.2
    most_cached = rnd.choice([0, 0, 4, 8])
    same_cached = rnd.randint(0, 4) if rnd.random() < 0.2 else None

    def cached() -> int:
        return rnd.randint(0, most_cached) if same_cached is None else same_cached

    x = [
        0 if zero_sizes and rnd.random() < 0.5 else rnd.randint(0, 6)
        for _ in range(length + 1)
    ]
    blocks = []
    for number in range(length):
        ends = x[number] + x[number + 1]
        # One in eight does not save its own input, so that the checkpoint holds it.
        saved = rnd.randint(0, 15) + (x[number] if rnd.random() < 0.875 else 0)
        options = [
            option(
                "keep",
                saved,
                max(saved, x[number]) + x[number + 1] + rnd.choice([0, 3, 8, 40]),
                rnd.randint(0, 12),
                cached=cached(),
            )
        ]
        if rnd.random() < 0.85:  # others are pinned, as prologue and epilogue are
            extra = 5 if equal_costs else rnd.randint(int(costly), 12)
            options.append(
                option(
                    "recompute",
                    x[number],
                    ends + rnd.choice([0, 3, 8, 40]),
                    rnd.randint(0, 25),
                    cached=cached(),
                    extra=extra,
                )
            )
            kinds = rnd.sample(OTHERS, rnd.randint(0, most_others))
            for mode, saved_ops, input_on_host in kinds:
                least = x[number] * (mode == "selective")
                options.append(
                    option(
                        mode,
                        rnd.randint(least, max(saved, least)),
                        ends + rnd.choice([0, 3, 8, 40]),
                        rnd.randint(0, 25),
                        cached=cached(),
                        extra=extra + rnd.randint(-extra, 4) if not costly else extra,
                        saved_ops=saved_ops,
                        input_on_host=input_on_host,
                    )
                )
        blocks.append(
            block(
                f"layers.{number}",
                *options,
                gradient=rnd.randint(0, 8),
                output=x[number + 1],
                joins_next=rnd.random() < 0.8,
            )
        )
    return chain_of(
        *blocks,
        static=rnd.randint(0, 15),
        input_bytes=x[0],
        optimizer=rnd.randint(0, 40),
    )


def random_problem(
    rnd: random.Random, length: int, *, costly: bool = False, most_others: int = 0
) -> Problem:
    """A random chain, with a budget from just below its lowest peak to its highest."""
    chain = random_chain(rnd, length, costly=costly, most_others=most_others)
    max_segment = rnd.choice([1, 2, 3, None])
    nested = bool(most_others) and rnd.random() < 0.5
    boundless = Problem(
        chain=chain, limit_bytes=0, max_segment=max_segment, nested=nested
    )
    peaks = [chain_peak_bytes(chain, plan) for plan in all_plans(boundless)]
    margin = 1 + (max(peaks) - min(peaks)) // 8
    limit_bytes = rnd.randint(min(peaks) - margin, max(peaks))
    return replace(boundless, limit_bytes=limit_bytes)


def rate(chain: ChainProfile, plan: Sequence[Segment]) -> tuple[int, int, int]:
    """Time, peak and wrapped blocks of a plan: what solvers minimise, in this order."""
    return (
        chain_time_ns(chain, plan),
        chain_peak_bytes(chain, plan),
        wrapped_count(plan),
    )


def rate_solution(problem: Problem, solution: Solution) -> tuple[int, int, int] | None:
    if solution.segments is None:
        return None
    return rate(problem.chain, solution.segments)


def rate_all(problem: Problem) -> list[tuple[int, int, int]]:
    """Every plan within the budget, rated."""
    rated = (rate(problem.chain, plan) for plan in all_plans(problem))
    return [each for each in rated if each[1] <= problem.limit_bytes]


def freeing(rnd: random.Random, problem: Problem) -> Problem:
    """Return a problem of single blocks, some of which free more than they save."""
    blocks = tuple(
        replace(
            each,
            options=tuple(
                replace(o, saved_bytes=o.saved_bytes - rnd.choice([0, 0, 9]))
                for o in each.options
            ),
        )
        for each in problem.chain.blocks
    )
    return replace(problem, chain=replace(problem.chain, blocks=blocks), max_segment=1)


def assert_reaches(problem: Problem, steps: Sequence[ChainStep], upper_ns: int) -> None:
    """Assert that these steps are a plan within the budget that takes so much more."""
    plan = segments_from_steps(problem, steps)
    plain_ns = chain_time_ns(problem.chain, ())
    assert chain_time_ns(problem.chain, plan) == plain_ns + upper_ns
    assert chain_peak_bytes(problem.chain, plan) <= problem.limit_bytes
