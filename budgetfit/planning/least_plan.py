"""What needs least of all that a plan may choose: whether any plan fits."""

from __future__ import annotations

import sys
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from budgetfit.core.errors import InputError, TraceError
from budgetfit.memory.chain_peak import chain_peak_bytes
from budgetfit.planning.chains import Setting, every_block
from budgetfit.planning.fastest import lowest_of_all, without_host
from budgetfit.planning.garbage import old_objects_left_alone
from budgetfit.planning.loss_parts import with_fewer_logits
from budgetfit.planning.practices import PRACTICES
from budgetfit.planning.search import judged, policy_segments
from budgetfit.planning.settled_traces import chains_of_each
from budgetfit.solvers.chain_dp import lowest_peak
from budgetfit.solvers.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.core.recipe import Segment
    from budgetfit.planning.chains import Chains
    from budgetfit.planning.search import Request
    from budgetfit.planning.subject import Subject

# What the formula finds this close to its lowest peak may reserve less; so many of them
# are judged.
NEARLY_LOWEST: Final = 1.05
MOST_JUDGED: Final = 6


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


def least_of(chains: Chains, request: Request, budget: Budget) -> Estimate | None:
    """Return something that fits, or the lowest peak; None if nothing can fit.

    Every block recomputed is one program, and says what the optimizer step takes.
    """
    if request.checkpointing == "auto":
        recompute_all = every_block(chains.traces.subject.blocks)
        recipe = chains.setting.recipe(request.batch_size or 1, recompute_all)
        full = judged(chains, recipe, budget)
        if full.fits:
            return full
        if full.phase_peaks_bytes["optimizer"] > budget.usable_bytes:
            return None
    return smallest(chains, request, budget)


def smallest(chains: Chains, request: Request, budget: Budget) -> Estimate:
    """Return the lowest judged peak at the request's batch size, or at batch 1.

    Where checkpointing is free: of what the formula finds lowest, with the loss whole
    and in parts, because the allocator may reserve less for one that is live with a
    little more. The first that fits ends the search.
    """
    tried = _lowest_by_formula(chains, request)
    least: Estimate | None = None
    for of_one_loss, segments in tried:
        recipe = of_one_loss.setting.recipe(request.batch_size or 1, segments)
        found = judged(of_one_loss, recipe, budget)
        if found.fits:
            return found
        if least is None or found.reserved_bytes < least.reserved_bytes:
            least = found
    assert least is not None  # noqa: S101 - nothing recomputed is always among them
    return least


def _lowest_by_formula(
    chains: Chains, request: Request
) -> list[tuple[Chains, tuple[Segment, ...]]]:
    """Return chains and segments of the lowest peaks, in their order."""
    rated: list[tuple[int, int, Chains, tuple[Segment, ...]]] = []
    for of_one_loss in with_fewer_logits(chains, request):
        size = request.batch_size or 1
        try:
            chain = of_one_loss.at(size)
        except (InputError, TraceError) as error:
            if of_one_loss is chains:
                raise
            chains.traces.log.append(f"the loss is not cut into parts: {error}")
            break
        lowest = [
            (chain_peak_bytes(chain, segments), len(rated) + number, segments)
            for number, segments in enumerate(_segments_to_try(of_one_loss, request))
        ]
        if rated and min(lowest)[0] >= min(rated)[0]:
            break  # what head and loss hold is not the peak any more
        rated += [(peak, number, of_one_loss, each) for peak, number, each in lowest]
    most = min(rated)[0] * NEARLY_LOWEST
    ordered = [row[2:] for row in sorted(rated, key=itemgetter(0, 1)) if row[0] <= most]
    return ordered[:MOST_JUDGED]


def _segments_to_try(chains: Chains, request: Request) -> list[tuple[Segment, ...]]:
    """Return segments that may have the lowest peak, without repetitions."""
    size = request.batch_size or 1
    if request.checkpointing != "auto":
        return [policy_segments(chains, request.checkpointing, size)]
    problem = Problem(chain=chains.at(size), budget_bytes=sys.maxsize)
    on_device = replace(problem, chain=without_host(problem.chain))
    tried = [
        lowest_of_all(problem).segments,
        lowest_of_all(on_device).segments,
        lowest_peak(on_device).segments,
        *(policy_segments(chains, name, size) for _, name in PRACTICES),
    ]
    return list(dict.fromkeys(each for each in tried if each is not None))
