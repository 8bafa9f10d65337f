"""Fallback recipe after an out-of-memory error: smaller micro-batches."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from budgetfit.core.plan import Estimate, Plan
from budgetfit.core.recipe import Recipe
from budgetfit.utils.format_bytes import format_bytes

_MODE_NAMES: Final = {
    "recompute": "recomputed",
    "selective": "recomputed selectively",
    "offload": "offloaded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackRecipe:
    """A recipe for the same optimizer step, and its expected memory.

    Attributes:
        recipe: With the effective batch size of the one that failed.
        reserved_bytes: Expected peak; None if unknown.
        judged: Whether the plan replayed it; else scaled down from one that was.
    """

    recipe: Recipe
    reserved_bytes: int | None
    judged: bool

    def __str__(self) -> str:
        recipe = self.recipe
        text = (
            f"batch_size {recipe.batch_size} x gradient_accumulation_steps "
            f"{recipe.gradient_accumulation_steps}, {_describe_segments(recipe)}"
        )
        if self.reserved_bytes is None:
            return text
        about = "" if self.judged else "about "
        return f"{text}, {about}{format_bytes(self.reserved_bytes)} reserved"


def _describe_segments(recipe: Recipe) -> str:
    """Count blocks by mode, for example ``8 blocks recomputed``."""
    counts = Counter(
        _MODE_NAMES[segment.mode] for segment in recipe.segments for _ in segment.blocks
    )
    if not counts:
        return "every block kept"
    return " and ".join(
        f"{count} block{'s' if count > 1 else ''} {word}"
        for word, count in counts.items()
    )


def find_fallback_recipe(
    recipe: Recipe, plan: Plan | None, *, usable_bytes: int | None, growth: float = 1.0
) -> FallbackRecipe | None:
    """Return the fastest recipe that should fit and gives the same optimizer steps.

    First the plan's replayed alternatives that take less than ``recipe``, else the same
    recipe with smaller and more micro-batches; None if there are none. The effective
    batch size, precision and optimizer never change.

    ``usable_bytes``: what the allocator may reserve; None if unknown, for less than
    ``recipe`` was predicted to reserve. ``growth``: ratio of needed to predicted bytes,
    of what grows with the batch.
    """
    if plan is not None:
        known = _predicted(recipe, plan)
        limit = usable_bytes
        if limit is None and known is not None:
            limit = known.reserved_bytes - 1
        if limit is not None:
            most = limit
            if known is not None:  # a limit that it met has not helped
                most = min(limit, _scaled(known, growth) - 1)
            return _alternative(recipe, plan, most, growth) or _smaller_micro_batch(
                recipe, known, limit, growth
            )
    return _smaller_micro_batch(recipe, None, None, growth)


def _predicted(recipe: Recipe, plan: Plan) -> Estimate | None:
    """Return the plan's estimate of the recipe, if it has one."""
    estimates = [plan.estimate, *(other.estimate for other in plan.judged_alternatives)]
    return next((each for each in estimates if each.recipe == recipe), None)


def _alternative(
    recipe: Recipe, plan: Plan, limit: int, growth: float
) -> FallbackRecipe | None:
    samples = recipe.effective_batch_size
    fitting = [
        (estimate.samples_per_s, estimate)
        for other in plan.judged_alternatives
        if other.fits
        and not other.is_suggestion
        and (estimate := other.estimate.with_samples(samples)) is not None
        and estimate.recipe.precision == recipe.precision
        and estimate.recipe.optimizer == recipe.optimizer
        and estimate.recipe != recipe
        and _scaled(estimate, growth) <= limit
    ]
    if not fitting:
        return None
    best = max(fitting, key=lambda pair: pair[0])[1]
    return FallbackRecipe(
        recipe=best.recipe, reserved_bytes=_scaled(best, growth), judged=growth == 1.0
    )


def _smaller_micro_batch(
    recipe: Recipe, known: Estimate | None, limit: int | None, growth: float
) -> FallbackRecipe | None:
    """Return the recipe with the largest smaller micro-batch that should fit."""
    if recipe.optimizer_in_backward:  # no accumulation
        return None
    total = recipe.samples_per_rank
    sizes = [size for size in range(recipe.batch_size - 1, 0, -1) if total % size == 0]
    for size in sizes:
        needed = None
        if known is not None and limit is not None:
            needed = _scaled(known, growth * size / recipe.batch_size)
            if needed > limit:
                continue
        smaller = replace(
            recipe, batch_size=size, gradient_accumulation_steps=total // size
        )
        return FallbackRecipe(recipe=smaller, reserved_bytes=needed, judged=False)
    return None


def _scaled(estimate: Estimate, factor: float) -> int:
    """Return the reserved peak with batch-dependent memory scaled by ``factor``."""
    # All but weights, gradients and states is assumed to scale with the batch; casts of
    # weights do not, so a smaller batch takes somewhat more than estimated.
    allocated = max(1, estimate.allocated_bytes)
    fixed = min(estimate.batch_independent_bytes, allocated)
    needed = fixed + (allocated - fixed) * factor
    return round(estimate.reserved_bytes * needed / allocated)
