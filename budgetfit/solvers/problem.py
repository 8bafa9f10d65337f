"""What a solver is asked and what it answers.

A solver is a function ``solve(problem) -> Solution``. It proposes segments and never a
peak: what a plan really needs is for ``memory.replay`` to say.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.errors import InputError
from budgetfit.core.recipe import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Find the fastest way to run a chain within so many bytes.

    Attributes:
        chain: What each block costs, at one batch size.
        budget_bytes: Most bytes that may be alive at any point, static ones included.
        max_segment: Most blocks in one recomputed segment; None for any number.
        nested: Whether segments of several blocks may be recomputed in two levels.
    """

    chain: ChainProfile
    budget_bytes: int
    max_segment: int | None = None
    nested: bool = False

    def __post_init__(self) -> None:
        """Refuse a segment length that allows nothing."""
        if self.max_segment is not None and self.max_segment < 1:
            raise InputError(
                "max_segment is the most blocks in one segment, for example 8, "
                f"or None for any number; got {self.max_segment}."
            )

    def longest_segment(self, start: int) -> int:
        """Return ``longest_segment`` of the chain under ``max_segment``."""
        return longest_segment(self.chain, start, self.max_segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solver's answer.

    Attributes:
        segments: What is not kept, in execution order; ``()`` keeps everything, None
            means that no plan was found.
        proven_optimal: No plan within the budget is faster; without segments: there is
            no plan within the budget.
        explanation: The same in plain words, and how it was found.
        least_time_ns: No plan within the budget has a shorter forward and backward;
            None where nothing is known. The certificate: how far from optimal the plan
            can be.
    """

    segments: tuple[Segment, ...] | None
    proven_optimal: bool
    explanation: str
    least_time_ns: int | None = None


def longest_segment(chain: ChainProfile, start: int, limit: int | None = None) -> int:
    """Return how many blocks a segment from block ``start`` on may have, at most limit.

    0 where that block must not be wrapped. Every shorter segment is possible too.
    """
    blocks = chain.blocks[start : None if limit is None else start + limit]
    length = 0
    for block in blocks:
        if block.option("recompute") is None:
            break
        length += 1
        if not block.joins_next:
            break
    return length


def segment(chain: ChainProfile, start: int, length: int) -> Segment:
    """Return the recomputed segment of ``length`` blocks from block ``start`` on."""
    return Segment(tuple(block.name for block in chain.blocks[start : start + length]))


def wrapped_count(segments: Sequence[Segment]) -> int:
    """Return how many blocks are in segments."""
    return sum(len(each.blocks) for each in segments)


def describe(chain: ChainProfile, segments: Sequence[Segment]) -> str:
    """Return what a plan does to the blocks, in plain words."""
    wrappable = sum(block.option("recompute") is not None for block in chain.blocks)
    if not segments:
        return f"All {wrappable} blocks are kept"
    lengths = [len(each.blocks) for each in segments]
    size = (
        f"{min(lengths)}"
        if min(lengths) == max(lengths)
        else f"{min(lengths)} to {max(lengths)}"
    )
    plural = "s" if len(segments) > 1 else ""
    verb = "is" if wrapped_count(segments) == 1 else "are"
    return (
        f"{wrapped_count(segments)} of {wrappable} blocks {verb} recomputed, "
        f"in {len(segments)} segment{plural} of {size}"
    )
