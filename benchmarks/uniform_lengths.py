"""Chen's sqrt(n) segments and every other uniform length against the plan.

    python -m benchmarks.uniform_lengths

The chains are the block profiles of real models. Beside each uniform length stands the
fastest plan that takes no more memory than it does, and at the end the lowest peak of
any plan. Peaks and times are those of the chain formula, without the optimizer step;
everything kept is the time that the others are compared with.
"""

import math
import sys
from dataclasses import replace
from typing import Final

from benchmarks.shared import GIB, chains_of, config, quiet, table
from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.chain_dp import chain_dp, lowest_peak
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.uniform_segments import chen_segments, uniform_segments

# Model, length, card, precision, samples per micro-batch.
CASES: Final = (
    ("SmolLM2-1.7B", 2048, "a100-80gb", "bf16-mixed", 16),
    ("vit-large-patch16-224", None, "a100-40gb", "bf16-mixed", 256),
)
MAX_SEGMENT: Final = 8
SHOWN: Final = (*range(1, 9), 12, 16, 24)


def cells(
    chain: ChainProfile, segments: tuple[Segment, ...] | None
) -> tuple[str, str, str]:
    """Return peak, peak above what is always there, and extra time of a plan."""
    if segments is None:
        return "no plan", "", ""
    peak = chain_peak_bytes(chain, segments)
    plain = chain_time_ns(chain, ())
    return (
        f"{peak / GIB:.2f}",
        f"{(peak - chain.static_bytes) / GIB:.2f}",
        f"{chain_time_ns(chain, segments) / plain - 1:+.1%}",
    )


def rows(chain: ChainProfile) -> tuple[list[tuple[str, ...]], list[int]]:
    """Return a line per uniform length, with the plan for the same memory.

    And the lengths that are faster than it.
    """
    count = sum(block.option("recompute") is not None for block in chain.blocks)
    chen = chen_segments(chain)
    found: list[tuple[str, ...]] = [("everything kept", *cells(chain, ()), *[""] * 3)]
    faster = []
    for length in range(1, count + 1):
        segments = uniform_segments(chain, length)
        budget = chain_peak_bytes(chain, segments)
        problem = Problem(chain=chain, limit_bytes=budget, max_segment=MAX_SEGMENT)
        plan = chain_dp(problem).segments
        if plan is None:  # only longer segments could take as little
            plan = chain_dp(replace(problem, max_segment=None)).segments
        if plan is None or chain_time_ns(chain, plan) > chain_time_ns(chain, segments):
            faster.append(length)
        name = f"{length} a segment"
        if segments == chen:
            name += f" = ceil(sqrt({count})), Chen"
        if length in SHOWN or segments == chen:
            found.append((name, *cells(chain, segments), *cells(chain, plan)))
    problem = Problem(chain=chain, limit_bytes=sys.maxsize, max_segment=MAX_SEGMENT)
    found.append(
        ("lowest peak", "", "", "", *cells(chain, lowest_peak(problem).segments))
    )
    return found, faster


def best_length(chain: ChainProfile) -> str:
    """Return what sqrt(n * input / saved) says, beside sqrt(n)."""
    middle = chain.blocks[len(chain.blocks) // 2]
    saved = middle.keep.saved_bytes
    given = chain.block_input_bytes(len(chain.blocks) // 2)
    count = sum(block.option("recompute") is not None for block in chain.blocks)
    return (
        f"A block saves {saved / given:.1f} times its input, so that the blocks alone "
        f"ask for about sqrt({count} / {saved / given:.1f}) = "
        f"{math.sqrt(count * given / saved):.1f} a segment, not sqrt({count}) = "
        f"{math.sqrt(count):.1f}; a large head asks for longer ones."
    )


def main() -> int:
    """Print a table per model."""
    quiet()
    headers = (
        "segments",
        "peak GiB",
        "above static",
        "extra time",
        "plan: peak GiB",
        "above static",
        "extra time",
    )
    for model, length, gpu, precision, batch_size in CASES:
        chains = chains_of(
            config(model),
            gpu,
            precision,
            max_length=length,
            effective_batch_size=4 * batch_size,
        )
        chain = chains.profile_at(batch_size)
        print(f"{model}, {batch_size} samples, {precision}, {gpu}:\n")
        lines, faster = rows(chain)
        print(table(headers, lines))
        print(f"\n* {best_length(chain)}")
        print(f"* Uniform lengths that are faster than the plan: {faster or 'none'}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
