"""Fall back to fp32 for models that cannot run in 16 bits.

See docs/decisions/0026-auto-precision-falls-back.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from budgetfit.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.planning.profiling.block_chain import TrainingSettings
    from budgetfit.workload.workload import Workload

Made = TypeVar("Made")


def fallback_for(precision: str | Sequence[str]) -> str | None:
    """Return the fallback of a requested precision; None if the user chose one.

    >>> fallback_for("auto"), fallback_for("bf16-mixed")
    ('fp32', None)
    """
    return "fp32" if precision == "auto" else None


def with_precision_fallback(
    make: Callable[[Workload, TrainingSettings], Made],
    workload: Workload,
    settings: TrainingSettings,
    fallback_precision: str | None,
) -> Made:
    """Return ``make(workload, settings)``, retried in ``fallback_precision``.

    The retry happens if the first precision cannot be traced; the workload then has a
    note that says so.

    Raises:
        TraceError: The first one, if there is no fallback or it fails as well.
    """
    try:
        return make(workload, settings)
    except TraceError as error:
        if fallback_precision is None or fallback_precision == settings.precision:
            raise
        note = f"{fallback_precision} instead of {settings.precision}, because: {error}"
        noted = replace(workload, notes=(*workload.notes, note))
        try:
            return make(noted, replace(settings, precision=fallback_precision))
        except TraceError:
            raise error from None
