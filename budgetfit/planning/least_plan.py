"""What needs least of all that a plan may choose: whether any plan fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.planning.chains import Setting
from budgetfit.planning.garbage import old_objects_left_alone
from budgetfit.planning.settled_traces import chains_of_each
from budgetfit.planning.what_if import least_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.planning.search import Request
    from budgetfit.planning.subject import Subject


@old_objects_left_alone()
def least_plan(  # noqa: PLR0913 - as make_plan
    subject: Subject,
    budget: Budget,
    request: Request,
    *,
    precisions: Sequence[str],
    optimizer: str,
    effective_batch_size: int | None = None,
    optimizer_in_backward: bool = False,
    instead: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Estimate | None:
    """Return something that fits, or the lowest peak; None if nothing can fit.

    At the request's batch size or at batch 1; without an effective batch size, with one
    micro-batch per optimizer step. The arguments are those of ``make_plan``, which
    finds a plan wherever this fits.

    Raises:
        TraceError: If the model cannot be traced.
    """
    setting = Setting(
        precision=precisions[0],
        optimizer=optimizer,
        effective_batch_size=effective_batch_size,
        optimizer_in_backward=optimizer_in_backward,
        host_ram_bytes=budget.host_ram_bytes,
    )
    found: list[Estimate] = []
    for chains in chains_of_each(subject, precisions, setting, instead, progress):
        if request.checkpointing == "as-is":
            own = chains.traces.subject.own_checkpointing()
            request = replace(request, checkpointing=own)
        least = least_of(chains, request, budget)
        if least is not None and least.fits:
            return least
        found += [] if least is None else [least]
    return min(found, key=lambda each: each.reserved_bytes, default=None)
