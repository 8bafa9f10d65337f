"""Another precision for models that cannot run in 16 bits (decision 0026)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from budgetfit.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.planning.profiling.block_chain import Setting
    from budgetfit.workload.workload import Subject

Made = TypeVar("Made")


def fallback(precision: str | Sequence[str]) -> str | None:
    """Return what may stand in for a precision; None for one that somebody chose.

    >>> fallback("auto"), fallback("bf16-mixed")
    ('fp32', None)
    """
    return "fp32" if precision == "auto" else None


def made_or_instead(
    make: Callable[[Subject, Setting], Made],
    subject: Subject,
    setting: Setting,
    instead: str | None,
) -> Made:
    """Return ``make(subject, setting)``, in ``instead`` if that cannot be traced.

    The subject then has a note that says so.

    Raises:
        TraceError: The first one, where ``instead`` does not help or is None.
    """
    try:
        return make(subject, setting)
    except TraceError as error:
        if instead is None or instead == setting.precision:
            raise
        note = f"{instead} instead of {setting.precision}, because: {error}"
        noted = replace(subject, notes=(*subject.notes, note))
        try:
            return make(noted, replace(setting, precision=instead))
        except TraceError:
            raise error from None
