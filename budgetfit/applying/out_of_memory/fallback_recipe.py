"""The next recipe to try when a planned one did not fit, from the plan's numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from budgetfit.core.recipe import Recipe
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.core.plan import Estimate, Plan

_WORDS: Final = {
    "recompute": "recomputed",
    "selective": "recomputed selectively",
    "offload": "offloaded",
}
# What does not grow with the batch.
_FIXED: Final = ("parameters", "buffers", "gradients", "optimizer_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerRecipe:
    """A recipe for the same optimizer step, and what it should take.

    Attributes:
        recipe: With the effective batch size of the one that failed.
        reserved_bytes: Expected peak; None where nothing is known.
        judged: Whether the plan replayed it, or it is scaled down from one that was.
    """

    recipe: Recipe
    reserved_bytes: int | None
    judged: bool

    def __str__(self) -> str:
        recipe = self.recipe
        text = (
            f"batch_size {recipe.batch_size} x gradient_accumulation_steps "
            f"{recipe.gradient_accumulation_steps}, {_treatment(recipe)}"
        )
        if self.reserved_bytes is None:
            return text
        about = "" if self.judged else "about "
        return f"{text}, {about}{format_bytes(self.reserved_bytes)} reserved"


def _treatment(recipe: Recipe) -> str:
    """Say how many blocks are treated how, for example ``8 blocks recomputed``."""
    counts = Counter(
        _WORDS[segment.mode] for segment in recipe.segments for _ in segment.blocks
    )
    if not counts:
        return "every block kept"
    return " and ".join(
        f"{count} block{'s' if count > 1 else ''} {word}"
        for word, count in counts.items()
    )


def smaller_recipe(
    recipe: Recipe,
    plan: Plan | None,
    *,
    usable_bytes: int | None,
    growth: float = 1.0,
) -> SmallerRecipe | None:
    """Return the fastest recipe that should fit and trains the same numbers.

    First the plan's alternatives that were replayed; else the same recipe with
    smaller micro-batches and as many more of them. The effective batch size, precision
    and optimizer never change (user-needs U2).

    Args:
        recipe: What did not fit.
        plan: Its plan, or None.
        usable_bytes: What the allocator may reserve; None if unknown: less than
            ``recipe`` was predicted to take.
        growth: What is needed over what was predicted, for everything that grows with
            the batch.

    Returns:
        None if no smaller micro-batch is left.
    """
    if plan is not None:
        known = _predicted(recipe, plan)
        limit = usable_bytes
        if limit is None and known is not None:
            limit = known.reserved_bytes - 1
        if limit is not None:
            return _alternative(recipe, plan, limit, growth) or _split(
                recipe, known, limit, growth
            )
    return _split(recipe, None, None, growth)


def _predicted(recipe: Recipe, plan: Plan) -> Estimate | None:
    """Return the plan's estimate of the recipe, if it has one."""
    estimates = [plan.estimate, *(other.estimate for other in plan.judged_alternatives)]
    return next((each for each in estimates if each.recipe == recipe), None)


def _alternative(
    recipe: Recipe, plan: Plan, limit: int, growth: float
) -> SmallerRecipe | None:
    samples = recipe.effective_batch_size
    fitting = [
        (estimate.samples_per_s, estimate)
        for other in plan.judged_alternatives
        if other.fits
        and not other.is_suggestion
        and (estimate := other.estimate.with_samples(samples)) is not None
        and _trains_the_same(estimate.recipe, recipe)
        and estimate.recipe != recipe
        and _scaled(estimate, growth) <= limit
    ]
    if not fitting:
        return None
    best = max(fitting, key=lambda pair: pair[0])[1]
    return SmallerRecipe(
        recipe=best.recipe,
        reserved_bytes=_scaled(best, growth),
        judged=growth == 1.0,
    )


def _trains_the_same(one: Recipe, other: Recipe) -> bool:
    return one.precision == other.precision and one.optimizer == other.optimizer


def _split(
    recipe: Recipe, known: Estimate | None, limit: int | None, growth: float
) -> SmallerRecipe | None:
    """Return the recipe with the largest smaller micro-batch that should fit."""
    if recipe.optimizer_in_backward:  # takes no accumulation
        return None
    total = recipe.effective_batch_size
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
        return SmallerRecipe(recipe=smaller, reserved_bytes=needed, judged=False)
    return None


def _scaled(estimate: Estimate, factor: float) -> int:
    """Return the reserved peak if what grows with the batch is ``factor`` times it.

    Everything at the peak but weights, gradients and states is taken to grow: casts of
    weights do not, so a smaller batch takes somewhat more than this says.
    """
    fixed = sum(estimate.at_peak_bytes.get(name, 0) for name in _FIXED)
    allocated = max(1, estimate.allocated_bytes)
    fixed = min(fixed, allocated)
    needed = fixed + (allocated - fixed) * factor
    return round(estimate.reserved_bytes * needed / allocated)
