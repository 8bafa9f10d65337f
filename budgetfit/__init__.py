"""Give it a PyTorch model and a VRAM budget; get training settings that fit.

The public names, nothing else. They are loaded when first used, so that what needs no
torch (``budgetfit --help``, ``budgetfit gpus``, reading a plan) starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from budgetfit.utils.late_import import import_late

if TYPE_CHECKING:
    from budgetfit.api.plan import apply, estimate, plan, verify
    from budgetfit.applying.run.run import Run
    from budgetfit.core.plan import Estimate, Plan, Verification
    from budgetfit.core.recipe import Recipe, Segment
    from budgetfit.errors import (
        BudgetfitError,
        DoesNotFitError,
        InputError,
        TraceError,
    )

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
    "BudgetfitError": "budgetfit.errors",
    "DoesNotFitError": "budgetfit.errors",
    "Estimate": "budgetfit.core.plan",
    "InputError": "budgetfit.errors",
    "Plan": "budgetfit.core.plan",
    "Recipe": "budgetfit.core.recipe",
    "Run": "budgetfit.applying.run.run",
    "Segment": "budgetfit.core.recipe",
    "TraceError": "budgetfit.errors",
    "Verification": "budgetfit.core.plan",
    "apply": "budgetfit.api.plan",
    "estimate": "budgetfit.api.plan",
    "plan": "budgetfit.api.plan",
    "verify": "budgetfit.api.plan",
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
