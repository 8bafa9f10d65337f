"""All text reports; ``print`` of a plan loads this file, and so do commands."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console, Group

from budgetfit.core.plan import Plan
from budgetfit.reporting.check_text import check_text
from budgetfit.reporting.compare_text import compare_text
from budgetfit.reporting.doctor_text import doctor_text
from budgetfit.reporting.estimate_text import estimate_text
from budgetfit.reporting.explain_text import explain_text
from budgetfit.reporting.layout import WIDE, WIDTH, make_console, render, show
from budgetfit.reporting.plan_text import (
    details_text,
    plan_text,
    reasons_text,
    recommendation_text,
)
from budgetfit.reporting.tables import gpus_text, layers_text
from budgetfit.reporting.verification_text import verification_text
from budgetfit.reporting.why_text import why_text

__all__ = [
    "WIDE",
    "WIDTH",
    "check_text",
    "compare_text",
    "details_text",
    "doctor_text",
    "estimate_text",
    "explain_text",
    "gpus_text",
    "layers_text",
    "make_console",
    "plan_text",
    "print_plan",
    "render",
    "show",
    "verification_text",
    "why_text",
]


def print_plan(  # noqa: PLR0913 - what may be shown
    plan: Plan,
    console: Console | None = None,
    *,
    saved_as: str | None = None,
    samples: int | None = None,
    details: bool = False,
    work: Callable[[], AbstractContextManager[Callable[[str], None] | None]] = (
        nullcontext
    ),
) -> None:
    """Print the plan, in colour on a terminal.

    On a terminal the recommendation comes before ``details`` are evaluated; ``work``
    is entered meanwhile, and shows progress.
    """
    console = console or make_console()
    if not details:
        show(plan_text(plan, saved_as=saved_as, samples=samples), console)
        return
    recommended = recommendation_text(plan, samples)
    if console.is_terminal:
        show(recommended, console)
    with work() as progress:
        if progress is not None:
            progress("judging the alternatives")
        reasons = reasons_text(plan, saved_as)
    show(reasons if console.is_terminal else Group(recommended, reasons), console)
