"""What a plan does, so that batches of all lengths, or image sizes, fit."""

from dataclasses import dataclass
from typing import Literal

LengthsMeasure = Literal["none", "longest first", "expandable segments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VaryingLengths:
    """Training on batches of several lengths, as replayed.

    Attributes:
        span: What varies: ``"samples of 64 to 512 tokens"``.
        shortest, longest: Tokens per sample; of images: pixels.
        measure: What keeps the allocator from fragmenting: nothing is needed, ``Run``
            runs a forward and backward of the longest batch first, or expandable
            segments (``PYTORCH_ALLOC_CONF=expandable_segments:True``).
        reserved_bytes: Most that was reserved, with the measure, and for other orders
            half of what the lengths added to the longest batch alone; where segments
            do not expand at least one more of the largest block. Where it does not
            fit, up to the first update that exceeded the budget.
        updates: How many updates were replayed, all orders together.
        pad_to_multiple_of: Batches are padded to a multiple of it; None: to their
            longest sample.
        samples_per_s: Over these lengths.
        plain_samples_per_s: Of the fastest settings for the longest batch alone, which
            may not fit over all lengths.
        grouped_samples_per_s: Were all samples of a batch equally long.
        fits: Whether ``reserved_bytes`` is within the budget.
    """

    span: str
    shortest: int
    longest: int
    measure: LengthsMeasure
    reserved_bytes: int
    updates: int
    samples_per_s: float
    plain_samples_per_s: float
    grouped_samples_per_s: float
    fits: bool
    pad_to_multiple_of: int | None = None

    @property
    def of_tokens(self) -> bool:
        """Whether lengths vary, and not sizes of images."""
        return self.span.endswith(" tokens")
