"""Whether a live model is the one that a plan was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from budgetfit.applying.packed_linear import parameter_count
from budgetfit.core.errors import InputError

if TYPE_CHECKING:
    from budgetfit.core.plan import Plan


def is_same_model(plan: Plan, model: nn.Module) -> bool:
    """Say whether the model has the planned blocks, and as many parameters."""
    return not _difference(plan, model)


def check_same_model(plan: Plan, model: nn.Module) -> None:
    """Refuse a model that is not the planned one.

    Raises:
        InputError: If parameter counts differ or a planned block is missing.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"The model must be a torch.nn.Module, not a {type(model).__name__}. Hand "
            "in the one that was planned, with its weights."
        )
    difference = _difference(plan, model)
    if difference:
        raise InputError(
            f"The plan was made for {plan.model.name}, and this model {difference}. "
            "Plan again for this model."
        )


def _difference(plan: Plan, model: nn.Module) -> str:
    """Return what is not as planned, in words; empty if nothing."""
    modules = dict(model.named_modules())
    missing = [name for name in plan.recipe.wrapped_blocks if name not in modules]
    if missing:
        return f"has no block {missing[0]!r}"
    count = parameter_count(model)
    if count != plan.model.parameter_count:
        return f"has {count:,} parameters, not {plan.model.parameter_count:,}"
    return ""
