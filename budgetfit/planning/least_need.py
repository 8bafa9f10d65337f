"""What a subject needs at least: whether some plan for it fits, without making one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.planning.chains import Setting
from budgetfit.planning.garbage import old_objects_left_alone
from budgetfit.planning.longest_length import Need
from budgetfit.planning.settled_traces import chains_of_each
from budgetfit.planning.what_if import least_of, smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.planning.search import Request
    from budgetfit.planning.subject import Subject


@old_objects_left_alone()
def least_need(  # noqa: PLR0913 - as make_plan
    subject: Subject,
    budget: Budget,
    request: Request,
    *,
    precisions: Sequence[str],
    optimizer: str,
    effective_batch_size: int | None = None,
    instead: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Need:
    """Return the lowest peak at the request's batch size, or at batch 1.

    The arguments are those of ``make_plan``, which finds a plan wherever this fits.

    Raises:
        TraceError: If the model cannot be traced.
    """
    setting = Setting(
        precision=precisions[0],
        optimizer=optimizer,
        effective_batch_size=effective_batch_size,
        host_ram_bytes=budget.host_ram_bytes,
    )
    found = []
    for chains in chains_of_each(subject, precisions, setting, instead, progress):
        if request.checkpointing == "as-is":
            own = chains.traces.subject.own_checkpointing()
            request = replace(request, checkpointing=own)
        found.append(smallest(chains, request, budget))
    return Need(
        needed_bytes=min(each.reserved_bytes for each in found),
        limit_bytes=budget.usable_bytes,
        fits=any(each.fits for each in found),
    )


@old_objects_left_alone()
def least_plan(  # noqa: PLR0913 - one value each, all needed
    subject: Subject,
    budget: Budget,
    request: Request,
    *,
    precision: str,
    optimizer: str,
    effective_batch_size: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Estimate | None:
    """Return something that fits, or the lowest peak; None if nothing can fit.

    Without an effective batch size: with one micro-batch per optimizer step.

    Raises:
        TraceError: If the model cannot be traced.
    """
    setting = Setting(
        precision=precision,
        optimizer=optimizer,
        effective_batch_size=effective_batch_size,
        host_ram_bytes=budget.host_ram_bytes,
    )
    (chains,) = chains_of_each(subject, [precision], setting, None, progress)
    return least_of(chains, request, budget)
