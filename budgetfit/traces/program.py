"""Program: which recipes run the same, so that one trace serves all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from budgetfit.core.recipe import Recipe, Segment


class Program(NamedTuple):
    """What a trace depends on, beyond the subject and the batch size."""

    precision: str
    optimizer: str
    segments: tuple[Segment, ...]
    accumulates: bool
    own_checkpointing: bool
    loss_chunks: int
    optimizer_in_backward: bool

    @classmethod
    def of(cls, recipe: Recipe, *, own_checkpointing: bool = False) -> Program:
        """Return the program of a recipe, with the model's own checkpointing or not."""
        return cls(
            precision=recipe.precision,
            optimizer=recipe.optimizer,
            segments=recipe.segments,
            accumulates=recipe.gradient_accumulation_steps > 1,
            own_checkpointing=own_checkpointing,
            loss_chunks=recipe.loss_chunks,
            optimizer_in_backward=recipe.optimizer_in_backward,
        )
