"""``compile="auto"``: plan without and with compiled blocks, and take the better."""

from collections.abc import Callable, Sequence

from budgetfit.core.plan import Plan
from budgetfit.core.recipe import CompileMode
from budgetfit.errors import DoesNotFitError, InputError, TraceError
from budgetfit.planning.session import rank
from budgetfit.solvers.batch_size import Objective
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text


def best_compiled(
    modes: Sequence[CompileMode],
    plan: Callable[[CompileMode], Plan],
    objective: Objective,
) -> Plan:
    """Return the best of the plans with several values of ``compile``, and say so.

    Raises:
        DoesNotFitError, InputError, TraceError: Of the first, if there is no plan.
    """
    if len(modes) == 1:
        return plan(modes[0])
    plans: dict[CompileMode, Plan] = {}
    errors: dict[CompileMode, Exception] = {}
    for mode in modes:
        try:
            plans[mode] = plan(mode)
        except (DoesNotFitError, InputError, TraceError) as error:
            errors[mode] = error
    if not plans:
        raise errors[modes[0]]
    best = min(plans, key=lambda mode: rank(plans[mode].estimate, objective))
    said = "; ".join(
        f"{mode}: {_figures(plans[mode]) if mode in plans else _reason(errors[mode])}"
        for mode in modes
    )
    note = f"compile='auto' chose {best!r}; {said}"
    return plans[best].changed(warnings=(note, *plans[best].warnings))


def _reason(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).splitlines()[0].rstrip(".")


def _figures(plan: Plan) -> str:
    estimate = plan.estimate
    return (
        f"{rate_text(estimate.samples_per_s)} samples/s, "
        f"{format_bytes(estimate.reserved_bytes)} reserved"
    )
