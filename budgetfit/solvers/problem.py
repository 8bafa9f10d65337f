"""``Problem`` and ``Solution`` of a solver.

A solver is a function ``solve(problem) -> Solution``. It proposes segments; the peak of
a plan is determined by ``memory.replay``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Find the fastest way to run a chain within so many bytes.

    Attributes:
        chain: Costs of each block, at one batch size.
        limit_bytes: Limit of live bytes, static ones included.
        max_segment: Most blocks in one recomputed segment; None for any number.
        nested: Whether segments of several blocks may be checkpointed inside again.
    """

    chain: ChainProfile
    limit_bytes: int
    max_segment: int | None = None
    nested: bool = False

    def __post_init__(self) -> None:
        """Check ``max_segment``."""
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
    """A solver's plan, and what is proven of it.

    Attributes:
        segments: The segments that are not kept, in execution order; ``()`` keeps
            everything, None means that no plan was found.
        proven_optimal: No plan within the budget is faster; without segments: there is
            no plan within the budget.
        explanation: Text for users: the plan, and how it was found.
        lower_bound_ns: No plan within the budget has a shorter forward and backward;
            None if unknown. Gives the optimality gap.
    """

    segments: tuple[Segment, ...] | None
    proven_optimal: bool
    explanation: str
    lower_bound_ns: int | None = None


def longest_segment(chain: ChainProfile, start: int, limit: int | None = None) -> int:
    """Return the most blocks that a segment from block ``start`` on may have.

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


def single_segment(block: BlockProfile, option: BlockOption) -> Segment:
    """Return the segment of one block with one of its options, not ``keep``."""
    if option.mode == "keep":
        raise InputError(
            f"Block {block.name!r} is kept without a segment: leave it out."
        )
    return Segment(
        (block.name,),
        mode=option.mode,
        saved_ops=option.saved_ops,
        input_on_host=option.input_on_host,
    )


def segment(
    chain: ChainProfile,
    start: int,
    length: int,
    *,
    nested: bool = False,
    input_on_host: bool = False,
) -> Segment:
    """Return the recomputed segment of ``length`` blocks from block ``start`` on."""
    names = tuple(block.name for block in chain.blocks[start : start + length])
    return Segment(names, nested=nested, input_on_host=input_on_host)


def segment_variants(problem: Problem, start: int) -> list[tuple[bool, bool]]:
    """Return the (nested, input on host) variants of segments of several blocks."""
    block = problem.chain.blocks[start]
    on_host = block.option("recompute", input_on_host=True) is not None
    inputs = (False, True) if on_host else (False,)
    levels = (False, True) if problem.nested else (False,)
    return [(nested, host) for nested in levels for host in inputs]


def wrapped_count(segments: Sequence[Segment]) -> int:
    """Return the number of blocks in segments."""
    return sum(len(each.blocks) for each in segments)


def describe(chain: ChainProfile, segments: Sequence[Segment]) -> str:
    """Return a description of a plan as text."""
    wrappable = sum(len(block.options) > 1 for block in chain.blocks)
    if not segments:
        return f"All {wrappable} blocks are kept"
    again = [each for each in segments if each.mode == "recompute"]
    counts = [
        (wrapped_count(again), f"recomputed, {_in_segments(again)}" if again else ""),
        (
            sum(each.mode == "selective" for each in segments),
            "recomputed but for some ops' outputs",
        ),
        (sum(each.mode == "offload" for each in segments), "offloaded to the host"),
    ]
    parts: list[str] = []
    for count, words in counts:
        of_all = "" if parts else f" of {wrappable} blocks"
        if count:
            verb = "is" if count == 1 else "are"
            parts.append(f"{count}{of_all} {verb} {words}")
    return "; ".join(parts)


def _in_segments(segments: Sequence[Segment]) -> str:
    """Return a description of the recomputed segments as text."""
    lengths = [len(each.blocks) for each in segments]
    size = (
        f"{min(lengths)}"
        if min(lengths) == max(lengths)
        else f"{min(lengths)} to {max(lengths)}"
    )
    plural = "s" if len(segments) > 1 else ""
    details = [
        f"{count} {words}"
        for count, words in (
            (sum(each.nested for each in segments), "nested"),
            (sum(each.input_on_host for each in segments), "with inputs on the host"),
        )
        if count
    ]
    inside = f" ({', '.join(details)})" if details else ""
    return f"in {len(segments)} segment{plural} of {size}{inside}"
