"""BlockRow: the checkpointing of one block in a plan, and its other options."""

from collections.abc import Sequence
from dataclasses import dataclass

from budgetfit.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChoice:
    """One checkpointing option of one block, by the memory formula of the chain.

    Attributes:
        mode, saved_ops, input_on_host: As in ``Segment``; ``keep`` is a mode, too.
        saved_bytes: Activation bytes kept from the block's forward to its backward.
        backward_bytes: Peak live bytes in its backward above all saved activations.
        extra_ms: Time added to a micro-batch.
        plan_peak_bytes: The plan's peak of live bytes if only this were changed.
        plan_ms: A micro-batch's forward and backward if only this were changed.
    """

    mode: str
    saved_ops: tuple[str, ...] = ()
    input_on_host: bool = False
    saved_bytes: int
    backward_bytes: int
    extra_ms: float
    plan_peak_bytes: int
    plan_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One block of a plan.

    Attributes:
        segment: The blocks that are recomputed together, itself included; () if its
            activations are kept.
        nested: Whether they are recomputed in two levels.
        choices: All its options; ``choices[chosen]`` is the plan's.
        chosen: Index of the plan's option.
        prefix_bytes: Static bytes and saved activations of the blocks before it.
        peak_bytes: Peak live bytes while this block runs, forward or backward.
        limit_bytes: Limit on the plan's live bytes.
    """

    name: str
    segment: tuple[str, ...] = ()
    nested: bool = False
    choices: tuple[BlockChoice, ...]
    chosen: int
    prefix_bytes: int
    peak_bytes: int
    limit_bytes: int

    @property
    def choice(self) -> BlockChoice:
        """The plan's option."""
        return self.choices[self.chosen]

    @property
    def headroom_bytes(self) -> int:
        """Free bytes at the block's own peak."""
        return self.limit_bytes - self.peak_bytes


def find_block(rows: Sequence[BlockRow], name: str) -> BlockRow:
    """Find the row of a block by its module path or the end of it.

    Raises:
        InputError: If no block, or more than one, matches.
    """
    if not rows:
        raise InputError(
            "This plan has no block to explain: the model has none that repeats, or "
            "the plan was made without a table of them. Plan again."
        )
    for row in rows:
        if row.name == name:
            return row
    found = [row for row in rows if row.name.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    first = ", ".join(row.name for row in found or rows[:3])
    if found:
        raise InputError(f"{name!r} are several blocks: {first}. Write one in full.")
    named = " ".join(repr(name).split())[:80]
    raise InputError(
        f"{named} is not a block of this plan. Its blocks are {first} ..., "
        f"{len(rows)} in all."
    )
