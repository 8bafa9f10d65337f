"""How fast the solvers are, side by side: ``python -m benchmarks.solver_speed``.

Small chains are solved by trying everything and by exact labels; the last column is how
many times faster the labels are, and both answers are compared. Deep chains are solved
by labels alone, at 12, 30 and 50 % of what keeping everything takes. The targets are
0.1 s for up to 126 equal blocks and 1 s for 48 that all differ, segments up to 8.
"""

import random
import sys
import time
from collections.abc import Callable
from typing import Final

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.memory.chain_peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import chain_dp, lowest_peak
from budgetfit.solvers.exhaustive import count_plans, exhaustive
from budgetfit.solvers.problem import Problem, Solution

MAX_SEGMENT: Final = 8
SHARES: Final = (0.12, 0.3, 0.5)
MB: Final = 10**6
REPEATS: Final = 3


def transformer_chain(count: int, *, spread: float, cached: bool) -> ChainProfile:
    """Return blocks that save 17 times their input, as transformer blocks do.

    Args:
        count: How many blocks.
        spread: Every size and time is raised by up to this share, each by its own.
        cached: Whether autocast's copies of weights outlive recomputed blocks.
    """
    rnd = random.Random(11)  # noqa: S311 - a benchmark wants the same numbers always

    def vary(value: float) -> int:
        return int(value * (1 + spread * rnd.random()))

    inputs = [vary(MB) for _ in range(count + 1)]
    blocks = []
    for number in range(count):
        saved, gradient, forward_ns = vary(17 * MB), vary(MB), vary(10 * MB)
        copies = vary(MB / 2) if cached else 0
        blocks.append(
            BlockProfile(
                name=f"layers.{number}",
                options=(
                    BlockOption(
                        mode="keep",
                        saved_bytes=saved,
                        forward_bytes=saved + inputs[number + 1],
                        backward_bytes=2 * inputs[number] + gradient,
                    ),
                    BlockOption(
                        mode="recompute",
                        saved_bytes=inputs[number],
                        forward_bytes=10 * inputs[number] + copies,
                        backward_bytes=saved + inputs[number + 1] + gradient,
                        cached_bytes=copies,
                        extra_ns=forward_ns,
                    ),
                ),
                gradient_bytes=gradient,
                output_bytes=inputs[number + 1],
                forward_ns=forward_ns,
                backward_ns=2 * forward_ns,
                joins_next=True,
            )
        )
    return ChainProfile(
        batch_size=1,
        static_bytes=0,
        input_bytes=inputs[0],
        optimizer_bytes=0,
        optimizer_ns=0,
        blocks=tuple(blocks),
    )


def timed(
    solve: Callable[[Problem], Solution], problem: Problem
) -> tuple[Solution, float]:
    """Return the answer, and the seconds of the fastest of three runs."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        solution = solve(problem)
        seconds.append(time.perf_counter() - start)
    return solution, min(seconds)


def problem_of(
    chain: ChainProfile, share: float, max_segment: int | None = MAX_SEGMENT
) -> Problem:
    """Return the chain with a share of what keeping everything takes."""
    budget_bytes = int(share * chain_peak_bytes(chain, ()))
    return Problem(chain=chain, budget_bytes=budget_bytes, max_segment=max_segment)


def extra_share(problem: Problem, solution: Solution) -> str:
    """Return how much longer the plan takes than keeping everything."""
    if solution.segments is None:
        return "no plan" if solution.proven_optimal else "gave up"
    plain_ns = chain_time_ns(problem.chain, ())
    return f"+{chain_time_ns(problem.chain, solution.segments) / plain_ns - 1:.2%}"


def against_exhaustive() -> None:
    """Print both solvers on chains that can be tried out."""
    print(f"{'blocks':>6} {'plans':>8} {'exhaustive':>12} {'labels':>10} {'ratio':>8}")
    for count in (4, 6, 8, 10):
        chain = transformer_chain(count, spread=0.3, cached=True)
        problem = problem_of(chain, 0.6)
        tried, tried_s = timed(exhaustive, problem)
        found, found_s = timed(chain_dp, problem)
        same = (
            ""
            if extra_share(problem, tried) == extra_share(problem, found)
            else ("   DIFFERENT ANSWERS")
        )
        print(
            f"{count:>6} {count_plans(problem):>8,} {tried_s:>10.3f} s "
            f"{found_s:>8.4f} s {tried_s / found_s:>7.0f}x{same}"
        )


def deep_chains(max_segment: int | None) -> None:
    """Print exact labels on chains as deep as models are."""
    columns = "".join(f"{share:>9.0%} of keep-all" for share in SHARES)
    print(f"{'blocks':<32}{columns}{'lowest peak':>14}")
    for kind, spread, cached in (
        ("equal", 0.0, False),
        ("equal, weight copies", 0.0, True),
        ("all differ", 0.3, False),
        ("all differ, weight copies", 0.3, True),
    ):
        for count in (24, 48, 126):
            chain = transformer_chain(count, spread=spread, cached=cached)
            cells = ""
            for share in SHARES:
                problem = problem_of(chain, share, max_segment)
                found, seconds = timed(chain_dp, problem)
                cells += f"{extra_share(problem, found):>11} {seconds:>7.3f} s"
            _, seconds = timed(lowest_peak, problem_of(chain, 1.0, max_segment))
            print(f"{count:>4} {kind:<27}{cells}{seconds:>12.3f} s", flush=True)


def main() -> int:
    """Print both tables."""
    print("Trying everything against exact labels, at 60 % of keep-all:")
    against_exhaustive()
    print(
        f"\nExact labels, segments of up to {MAX_SEGMENT} blocks: extra time, seconds:"
    )
    deep_chains(MAX_SEGMENT)
    print("\nThe same with segments of any length:")
    deep_chains(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
