"""TracedSettings: the recipe fields that a trace depends on, the key of its memo."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from budgetfit.core.recipe import Recipe, Segment


class TracedSettings(NamedTuple):
    """What a trace depends on besides the workload and the batch size."""

    precision: str
    optimizer: str
    segments: tuple[Segment, ...]
    accumulates: bool
    own_checkpointing: bool
    loss_chunks: int
    optimizer_in_backward: bool

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, *, own_checkpointing: bool = False
    ) -> TracedSettings:
        """Return a recipe's fields; ``own_checkpointing``: the model's own stays on."""
        return cls(
            precision=recipe.precision,
            optimizer=recipe.optimizer,
            segments=recipe.segments,
            accumulates=recipe.gradient_accumulation_steps > 1,
            own_checkpointing=own_checkpointing,
            loss_chunks=recipe.loss_chunks,
            optimizer_in_backward=recipe.optimizer_in_backward,
        )
