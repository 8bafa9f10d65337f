"""PlanCurves: what the search knows around a plan, for the figures of its report."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from budgetfit.core.recipe import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingPoint:
    """One choice of checkpointing at the plan's batch size.

    ``label``: a usual practice, or empty for a point of the Pareto front.
    ``peak_bytes``: of allocated bytes. ``segments``: what is not simply kept.
    """

    label: str = ""
    peak_bytes: int
    samples_per_s: float
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizePoint:
    """The fastest checkpointing at one batch size that fits; fields as above."""

    batch_size: int
    gradient_accumulation_steps: int
    peak_bytes: int
    samples_per_s: float
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCurves:
    """Memory over time by category, and what other choices would take.

    The plan's point has its own numbers, of the replay; the others are by the formula
    that the solver uses, shifted and scaled so that it gives these for the plan.

    Attributes:
        category_bytes: For each point of the plan's timeline, category -> bytes at its
            peak, which they add up to; empty where the replay cannot be repeated.
        limit_bytes: Most allocated bytes of a choice that fits: the usable bytes less
            what the allocator reserves beyond them.
        plan: The plan itself.
        front: No choice at this batch size is both faster and lower in memory than
            one of these; fastest first, thinned out.
        practices: Usual practices at the plan's batch size.
        batch_sizes: The fastest choice at each of some batch sizes, ascending.
    """

    category_bytes: tuple[dict[str, int], ...] = ()
    limit_bytes: int
    plan: CheckpointingPoint
    front: tuple[CheckpointingPoint, ...] = ()
    practices: tuple[CheckpointingPoint, ...] = ()
    batch_sizes: tuple[BatchSizePoint, ...] = ()


@dataclass(frozen=True, slots=True)
class LazyCurves:
    """What is evaluated when it is asked for: ``curves`` also when it is pickled.

    ``snapshot`` returns the memory snapshot of a step, which is large: None once
    the plan was pickled.
    """

    curves: Callable[[], PlanCurves]
    snapshot: Callable[[], dict[str, Any]] | None = None

    def __call__(self) -> PlanCurves:
        """Return the curves."""
        return self.curves()

    def __reduce__(self) -> tuple[object, ...]:
        return _known_curves, (self.curves(),)


def _known_curves(curves: PlanCurves) -> LazyCurves:
    return LazyCurves(lambda: curves)
