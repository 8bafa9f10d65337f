"""Recipe: the decision. Nothing in it is an estimate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from budgetfit.core.errors import InputError

SegmentMode = Literal["recompute", "selective", "offload"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring blocks that are treated as one in the backward pass.

    Attributes:
        blocks: Module paths in the model, in execution order, for example
            ``("model.layers.0", "model.layers.1")``.
        mode: ``recompute`` saves only the first block's input and runs the forward
            again.
    """

    blocks: tuple[str, ...]
    mode: SegmentMode = "recompute"

    def __post_init__(self) -> None:
        """Refuse a segment that cannot mean anything."""
        if not self.blocks:
            raise InputError(
                'A segment needs at least one block name, for example ("layers.0",).'
            )
        if self.mode not in get_args(SegmentMode):
            raise InputError(
                f"{self.mode!r} is not a segment mode. "
                f"Use one of: {', '.join(get_args(SegmentMode))}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of a training run that decide its memory and speed.

    Attributes:
        batch_size: Samples per device and micro-batch.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        precision: Name of a policy of ``core.precision``.
        optimizer: transformers' ``optim`` name, or the qualified name of a callable.
        segments: What is not simply kept; ``()`` keeps everything, one name per segment
            is ordinary checkpointing, longer segments are Chen's sqrt(n).
    """

    batch_size: int
    gradient_accumulation_steps: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw_torch_fused"
    segments: tuple[Segment, ...] = field(default=())

    def __post_init__(self) -> None:
        """Refuse counts below one and blocks that are in two segments."""
        for name in ("batch_size", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{name} must be a whole number of at least 1, for example 8; "
                    f"got {value!r}."
                )
        blocks = self.wrapped_blocks
        twice = {block for block in blocks if blocks.count(block) > 1}
        if twice:
            raise InputError(
                f"Block {min(twice)!r} is in more than one segment. Name each once."
            )

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def wrapped_blocks(self) -> tuple[str, ...]:
        """Names of all blocks in segments, in the segments' order."""
        return tuple(block for segment in self.segments for block in segment.blocks)
