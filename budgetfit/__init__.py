"""Give it a PyTorch model and a VRAM budget; get training settings that fit.

The public API, imported lazily (PEP 562), so that ``budgetfit --help``, ``budgetfit
gpus`` and reading a plan do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from budgetfit.utils.lazy_import import lazy_import

if TYPE_CHECKING:
    from budgetfit.api.plan import apply, check, estimate, plan, verify
    from budgetfit.applying.out_of_memory.error import TrainingOutOfMemoryError
    from budgetfit.applying.run.run import Run
    from budgetfit.core.loop import Loop
    from budgetfit.core.parallelism import Parallelism
    from budgetfit.core.plan import Estimate, Plan
    from budgetfit.core.recipe import Recipe, Segment
    from budgetfit.core.verification import Verification
    from budgetfit.errors import (
        BudgetfitError,
        DoesNotFitError,
        InputError,
        RecomputationError,
        TraceError,
    )

__all__ = [
    "BudgetfitError",
    "DoesNotFitError",
    "Estimate",
    "InputError",
    "Loop",
    "Parallelism",
    "Plan",
    "Recipe",
    "RecomputationError",
    "Run",
    "Segment",
    "TraceError",
    "TrainingOutOfMemoryError",
    "Verification",
    "apply",
    "check",
    "estimate",
    "plan",
    "verify",
]

_MODULES: Final = {
    "BudgetfitError": "budgetfit.errors",
    "DoesNotFitError": "budgetfit.errors",
    "Estimate": "budgetfit.core.plan",
    "InputError": "budgetfit.errors",
    "Loop": "budgetfit.core.loop",
    "Parallelism": "budgetfit.core.parallelism",
    "Plan": "budgetfit.core.plan",
    "Recipe": "budgetfit.core.recipe",
    "RecomputationError": "budgetfit.errors",
    "Run": "budgetfit.applying.run.run",
    "Segment": "budgetfit.core.recipe",
    "TraceError": "budgetfit.errors",
    "TrainingOutOfMemoryError": "budgetfit.applying.out_of_memory.error",
    "Verification": "budgetfit.core.verification",
    "apply": "budgetfit.api.plan",
    "check": "budgetfit.api.plan",
    "estimate": "budgetfit.api.plan",
    "plan": "budgetfit.api.plan",
    "verify": "budgetfit.api.plan",
}


def __getattr__(name: str) -> object:
    """Import a public name on first access (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(lazy_import(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names before they are imported, for completion."""
    return sorted({*globals(), *__all__})
