"""How fast the solvers are, side by side: ``python -m benchmarks.solver_speed``.

Blocks have six options (kept, recomputed with the input on the device or the host, two
op sets saved, offloaded), segments of up to 8 blocks, at 12, 30 and 50 % of what
keeping everything takes. The targets: 0.1 s for up to 126 equal blocks, 1 s for as many
that all differ, and a certificate of at most 0.1 % of the step's time. HiGHS solves the
same chains as one integer program, and trying everything the small ones.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Final

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import chain_dp, lowest_peak
from budgetfit.solvers.problem import Problem, Solution
from tests.solvers.chain_milp import chain_milp
from tests.solvers.exhaustive import count_plans, exhaustive

MAX_SEGMENT: Final = 8
SHARES: Final = (0.12, 0.3, 0.5)
COUNTS: Final = (24, 48, 80, 126)
MB: Final = 10**6
REPEATS: Final = 5
EQUAL_TARGET_S: Final = 0.1
DIFFERENT_TARGET_S: Final = 1.0
CERTIFICATE_TARGET: Final = 0.001
MILP_LIMIT_S: Final = 10.0

Solve = Callable[[Problem], Solution]


def transformer_chain(count: int, *, spread: float, cached: bool) -> ChainProfile:
    """Return blocks that save 17 times their input, as transformer blocks do.

    Args:
        count: How many blocks.
        spread: Every size and time is raised by up to this share, each by its own.
        cached: Whether autocast's copies of weights outlive recomputed blocks.
    """
    rnd = random.Random(11)

    def vary(value: float) -> int:
        return int(value * (1 + spread * rnd.random()))

    inputs = [vary(MB) for _ in range(count + 1)]
    blocks = []
    for number in range(count):
        saved, gradient, forward_ns = vary(17 * MB), vary(MB), vary(10 * MB)
        blocks.append(
            BlockProfile(
                name=f"layers.{number}",
                options=_options(
                    inputs[number : number + 2],
                    saved,
                    gradient,
                    forward_ns,
                    vary(MB / 2) if cached else 0,
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


def _options(
    ends: list[int], saved: int, gradient: int, forward_ns: int, copies: int
) -> tuple[BlockOption, ...]:
    """Return a block's options: what is not saved is made or fetched again."""
    before, after = ends
    kept = BlockOption(
        mode="keep",
        saved_bytes=saved,
        forward_bytes=saved + after,
        backward_bytes=2 * before + gradient,
    )
    recomputed = BlockOption(
        mode="recompute",
        saved_bytes=before,
        forward_bytes=10 * before + copies,
        backward_bytes=saved + after + gradient,
        cached_bytes=copies,
        extra_ns=forward_ns,
    )
    on_host = BlockOption(
        mode="recompute",
        saved_bytes=0,
        forward_bytes=10 * before + copies,
        backward_bytes=saved + before + after + gradient,
        cached_bytes=copies,
        extra_ns=int(1.05 * forward_ns),
        input_on_host=True,
    )
    offloaded = BlockOption(
        mode="offload",
        saved_bytes=0,
        forward_bytes=saved + after,
        backward_bytes=saved + 2 * before + gradient,
        cached_bytes=copies,
        extra_ns=int(0.8 * forward_ns),
    )
    some, more = ("aten.mm.default:0",), ("aten.mm.default:0", "aten.mm.default:1")
    selective = (
        BlockOption(
            mode="selective",
            saved_bytes=int(share * saved),
            forward_bytes=12 * before + copies,
            backward_bytes=saved - int(share * saved) + after + gradient,
            cached_bytes=copies,
            extra_ns=int(again * forward_ns),
            saved_ops=ops,
        )
        for share, again, ops in ((0.3, 0.45, some), (0.6, 0.06, more))
    )
    return (kept, recomputed, on_host, *selective, offloaded)


def timed(solve: Solve, problem: Problem) -> tuple[Solution, float]:
    """Return the answer, and the median seconds of several runs."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        solution = solve(problem)
        seconds.append(time.perf_counter() - start)
        if seconds[0] > DIFFERENT_TARGET_S:
            break
    return solution, statistics.median(seconds)


def problem_of(
    chain: ChainProfile,
    share: float,
    max_segment: int | None = MAX_SEGMENT,
    *,
    nested: bool = False,
) -> Problem:
    """Return the chain with a share of what keeping everything takes."""
    limit_bytes = int(share * chain_peak_bytes(chain, ()))
    return Problem(
        chain=chain, limit_bytes=limit_bytes, max_segment=max_segment, nested=nested
    )


def extra_share(problem: Problem, solution: Solution) -> str:
    """Return how much longer the plan takes than keeping everything."""
    if solution.segments is None:
        return "no plan" if solution.proven_optimal else "gave up"
    plain_ns = chain_time_ns(problem.chain, ())
    return f"+{chain_time_ns(problem.chain, solution.segments) / plain_ns - 1:.3%}"


def gap(problem: Problem, solution: Solution) -> float:
    """Return the certificate: how far from optimal the plan can be, as a share."""
    if solution.segments is None or solution.lower_bound_ns is None:
        return float("nan")
    time_ns = chain_time_ns(problem.chain, solution.segments)
    return (time_ns - solution.lower_bound_ns) / time_ns


def against_exhaustive() -> None:
    """Print all exact solvers on chains that can be tried out."""
    print(f"{'blocks':>6} {'plans':>8} {'everything':>12} {'labels':>10} {'HiGHS':>10}")
    for count in (2, 3, 4, 5):
        chain = transformer_chain(count, spread=0.3, cached=True)
        problem = problem_of(chain, 0.6, 3)
        tried, tried_s = timed(exhaustive, problem)
        found, found_s = timed(chain_dp, problem)
        program, program_s = timed(chain_milp, problem)
        answers = {extra_share(problem, each) for each in (tried, found, program)}
        print(
            f"{count:>6} {count_plans(problem):>8,} {tried_s:>10.3f} s "
            f"{found_s:>8.4f} s {program_s:>8.4f} s  "
            + ("same answer" if len(answers) == 1 else f"DIFFERENT: {answers}")
        )


def deep_chains(max_segment: int | None, *, nested: bool) -> bool:
    """Print chains as deep as models are; return whether the targets are met."""
    print(
        f"{'blocks':<31}"
        + "".join(f"{share:>8.0%} of keep-all   " for share in SHARES)
        + f"{'lowest peak':>13}   labels of a block"
    )
    met = True
    for kind, spread, cached in (
        ("equal", 0.0, False),
        ("equal, weight copies", 0.0, True),
        ("all differ", 0.3, False),
        ("all differ, weight copies", 0.3, True),
    ):
        target_s = DIFFERENT_TARGET_S if spread else EQUAL_TARGET_S
        for count in COUNTS:
            chain = transformer_chain(count, spread=spread, cached=cached)
            cells, labels = "", []
            for share in SHARES:
                problem = problem_of(chain, share, max_segment, nested=nested)
                found, seconds = timed(chain_dp, problem)
                sure = gap(problem, found)
                good = seconds <= target_s and not sure > CERTIFICATE_TARGET
                met = met and good
                proof = "  " if found.proven_optimal else f" gap {sure:.3%}"
                cells += f"{extra_share(problem, found):>10} {seconds:>6.3f} s"
                cells += f"{' ' if good else '!'}{proof}"
                labels.append(found.explanation.split("at most ")[-1].split(" ")[0])
            problem = problem_of(chain, 1.0, max_segment, nested=nested)
            _, seconds = timed(lowest_peak, problem)
            print(
                f"{count:>4} {kind:<26}{cells}{seconds:>11.3f} s   {', '.join(labels)}",
                flush=True,
            )
    return met


def grids_alone() -> None:
    """Print what the bounds of a grid certify where no label is looked at."""
    print(f"{'blocks':>6}" + "".join(f"{share:>26.0%}" for share in SHARES))
    for count in COUNTS:
        chain = transformer_chain(count, spread=0.3, cached=True)
        cells = ""
        for share in SHARES:
            problem = problem_of(chain, share)
            found, seconds = timed(lambda it: chain_dp(it, max_labels=0), problem)
            cells += f"   gap {gap(problem, found):>8.4%} {seconds:>7.3f} s"
        print(f"{count:>6}{cells}", flush=True)


def against_highs() -> None:
    """Print HiGHS beside the labels on deep chains, stopped after some seconds."""
    print(f"{'blocks':<22}{'budget':>7} {'labels':>21}   HiGHS")
    for kind, spread in (("equal", 0.0), ("all differ", 0.3)):
        for count in COUNTS[:3]:
            chain = transformer_chain(count, spread=spread, cached=False)
            for share in SHARES[:2]:
                problem = problem_of(chain, share)
                found, seconds = timed(chain_dp, problem)
                start = time.perf_counter()
                other = chain_milp(problem, MILP_LIMIT_S)
                took = time.perf_counter() - start
                status = (
                    "optimal"
                    if other.proven_optimal
                    else f"stopped, gap {gap(problem, other):.3%}"
                )
                print(
                    f"{count:>4} {kind:<17}{share:>7.0%} "
                    f"{extra_share(problem, found):>10} {seconds:>7.3f} s   "
                    f"{extra_share(problem, other):>9} {took:>7.3f} s  {status}",
                    flush=True,
                )


def main() -> int:
    """Print all tables."""
    print("Trying everything, exact labels and an integer program, at 60 %:")
    against_exhaustive()
    print(f"\nSegments of up to {MAX_SEGMENT} blocks; extra time, median seconds:")
    met = deep_chains(MAX_SEGMENT, nested=False)
    print("\nWith nested segments too:")
    deep_chains(MAX_SEGMENT, nested=True)
    print("\nCertificates of the grids alone, blocks that all differ:")
    grids_alone()
    print(f"\nThe same by HiGHS, stopped after {MILP_LIMIT_S:.0f} s:")
    against_highs()
    print(
        f"\nTargets ({EQUAL_TARGET_S} s equal, {DIFFERENT_TARGET_S} s all different, "
        f"certificate {CERTIFICATE_TARGET:.1%}): {'met' if met else 'NOT met (!)'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
