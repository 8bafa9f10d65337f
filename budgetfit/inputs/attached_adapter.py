"""Adapters of a plan on the live model: put on to train or to verify, and taken off."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import nn

from budgetfit.applying.undo import Undo
from budgetfit.core.plan import Plan
from budgetfit.errors import InputError
from budgetfit.inputs.plan_source import PlanSource
from budgetfit.integrations.peft import adapters_on, code, with_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from budgetfit.applying.run.run import Run


def put_on(plan: Plan, model: Any) -> tuple[Any, Callable[[], object]]:  # noqa: ANN401
    """Return the model that a plan trains, and what gives the plain one back.

    Args:
        plan: One without an adapter trains the model itself.
        model: A plain model gets the adapters; one that has some is trained as it is.
            None: the one that was planned.

    Raises:
        InputError: If there is none, or it must be loaded quantised, and is not.
    """
    if not isinstance(plan, Plan) or plan.adapter is None:
        return model, _nothing
    model = _given_or_planned(plan, model)
    if model is None:
        raise InputError(
            "This plan has no model with weights to train: it was loaded from disk or "
            "made from a config. Load one and hand it in, budgetfit.apply(plan, "
            f"model):\n{code(plan.adapter)}"
        )
    if not isinstance(model, nn.Module):
        return model, _nothing
    return with_adapters(model, plan.adapter)


def take_off_last(run: Run, put_back: Callable[[], object]) -> Run:
    """Let ``run.undo()`` take adapters off too, after everything else."""
    undo = Undo()
    undo.add(put_back)
    undo.add(run._undo)  # noqa: SLF001 - the one who made the run adds to its undoing
    run._undo = undo  # noqa: SLF001
    return run


@contextlib.contextmanager
def planned_adapters(plan: Plan, model: Any) -> Iterator[Any]:  # noqa: ANN401
    """Give a plain module its planned adapters while the context is open.

    What is no module (a hub id, or nothing) is built with adapters when it is verified.
    """
    adapter = plan.adapter if isinstance(plan, Plan) else None
    live = None if adapter is None else _given_or_planned(plan, model)
    if not isinstance(live, nn.Module):
        yield model
        return
    with adapters_on(live, adapter) as adapted:
        yield adapted


def _given_or_planned(plan: Plan, model: Any) -> Any:  # noqa: ANN401
    if model is None and isinstance(plan.source, PlanSource):
        return plan.source.model
    return model


def _nothing() -> None:
    """Stand in for taking off what was not put on."""
