"""Give it a PyTorch model and a VRAM budget; get training settings that fit.

The public names, nothing else. They are loaded when first used, so that what needs no
torch (``budgetfit --help``, ``budgetfit gpus``, reading a plan) starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from budgetfit.core.late_import import import_late

if TYPE_CHECKING:
    from budgetfit.api import apply, estimate, plan, verify
    from budgetfit.applying.run import Run
    from budgetfit.core.errors import (
        BudgetfitError,
        DoesNotFitError,
        InputError,
        TraceError,
    )
    from budgetfit.core.plan import Estimate, Plan, Verification
    from budgetfit.core.recipe import Recipe, Segment

__all__ = [
    "BudgetfitError",
    "DoesNotFitError",
    "Estimate",
    "InputError",
    "Plan",
    "Recipe",
    "Run",
    "Segment",
    "TraceError",
    "Verification",
    "apply",
    "estimate",
    "plan",
    "verify",
]

_HOMES: Final = {
    "BudgetfitError": "budgetfit.core.errors",
    "DoesNotFitError": "budgetfit.core.errors",
    "Estimate": "budgetfit.core.plan",
    "InputError": "budgetfit.core.errors",
    "Plan": "budgetfit.core.plan",
    "Recipe": "budgetfit.core.recipe",
    "Run": "budgetfit.applying.run",
    "Segment": "budgetfit.core.recipe",
    "TraceError": "budgetfit.core.errors",
    "Verification": "budgetfit.core.plan",
    "apply": "budgetfit.api",
    "estimate": "budgetfit.api",
    "plan": "budgetfit.api",
    "verify": "budgetfit.api",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_late(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names before they are loaded, for completion."""
    return sorted({*globals(), *__all__})
