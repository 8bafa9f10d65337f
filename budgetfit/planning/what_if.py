"""The usual practices beside the plan, and what would help when nothing fits."""

from __future__ import annotations

import sys
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from budgetfit.applying.offloaded_optimizer import NAME as OFFLOADED
from budgetfit.core.errors import DoesNotFitError, InputError, Suggestion, TraceError
from budgetfit.core.plan import Alternative
from budgetfit.core.precision import PRECISIONS
from budgetfit.memory.chain_peak import chain_peak_bytes
from budgetfit.planning.chains import Chains, every_block
from budgetfit.planning.every_nth import SOLVED, ordinal, which_nth
from budgetfit.planning.fastest import lowest_of_all, without_host
from budgetfit.planning.levers import (
    can_step_in_backward,
    lever_rows,
    with_lora,
)
from budgetfit.planning.loss_parts import (
    search_with_loss_parts,
    with_fewer_logits,
)
from budgetfit.planning.practices import EVERY_NTH, PRACTICES, best, best_of_policy
from budgetfit.planning.search import Request, judged, policy_segments, search
from budgetfit.solvers.chain_dp import lowest_peak
from budgetfit.solvers.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.core.recipe import Segment
    from budgetfit.solvers.batch_size import Objective

OBJECTIVES: tuple[tuple[str, Objective], ...] = (
    ("fastest", "throughput"),
    ("largest batch", "batch_size"),
    ("lowest memory", "memory"),
)
OBJECTIVE_ROUNDS = 2  # recipes that are judged for each other objective
# Levers that change training: only suggested, with what each would need.
OPTIMIZERS = ("adamw_bnb_8bit", OFFLOADED, "adafactor", "sgd")
# What a change of an argument can free at most.
FREES: Final = {
    "optimizer": "optimizer_state",
    "optimizer_in_backward": "gradients",
}
# What the formula finds this close to its lowest peak may reserve less; so many of them
# are judged.
NEARLY_LOWEST: Final = 1.05
MOST_JUDGED: Final = 6


def alternatives(
    chains: Chains, request: Request, budget: Budget, plan: Estimate
) -> tuple[Alternative, ...]:
    """Return the usual practices, the other objectives, and levers on training.

    Each is at its own best batch, judged like the plan.
    """
    first = decisive_rows(chains, request, budget)
    return (*first, *further_rows(chains, request, budget, plan, first))


def decisive_rows(
    chains: Chains, request: Request, budget: Budget
) -> tuple[Alternative, ...]:
    """Return the usual practices that may come out ahead of what the solver proposes.

    Chen's segments never recompute less than the solver's, so they can win memory only.
    """
    shown = PRACTICES if request.objective != "throughput" else PRACTICES[:-1]
    return _practices(chains, request, budget, shown)


def further_rows(
    chains: Chains,
    request: Request,
    budget: Budget,
    plan: Estimate,
    first: tuple[Alternative, ...],
) -> tuple[Alternative, ...]:
    """Return the alternatives that decide nothing; ``first`` are those that did."""
    shown = [row.label for row in first]
    # Where nothing has to be recomputed, every n-th block need not be either.
    usual = (*PRACTICES, EVERY_NTH) if plan.recipe.segments else PRACTICES
    others = tuple(pair for pair in usual if pair[0] not in shown)
    rest = _practices(chains, request, budget, others)
    return (
        *rest,
        *_without_host(chains, request, budget, plan),
        *_other_objectives(chains, request, budget, [*first, *rest]),
        *lever_rows(chains, request, budget, plan),
    )


def _without_host(
    chains: Chains, request: Request, budget: Budget, plan: Estimate
) -> tuple[Alternative, ...]:
    """Return the best plan that leaves host memory alone, where the plan does not."""
    if not plan.host_bytes:
        return ()
    setting = replace(chains.setting, loss_chunks=1, host_ram_bytes=0)
    on_device = Chains(chains.traces, setting)
    own_chain, found = search_with_loss_parts(on_device, request, budget)
    estimate = found.estimate or smallest(own_chain, request, budget)
    label = "without host memory"
    return (Alternative(label=label, estimate=estimate, fits=bool(estimate.fits)),)


def _practices(
    chains: Chains,
    request: Request,
    budget: Budget,
    shown: tuple[tuple[str, str], ...],
) -> tuple[Alternative, ...]:
    blocks = chains.traces.subject.blocks
    rows = []
    for label, policy in shown:
        if policy != "none" and not blocks:
            continue
        found = best_of_policy(chains, policy, request, budget)
        n = which_nth(found.recipe.segments, blocks)
        if policy == SOLVED and not (found.fits and n):
            continue
        named = label.replace("n-th", ordinal(n or 0))
        rows.append(Alternative(label=named, estimate=found, fits=bool(found.fits)))
    return tuple(rows)


def _other_objectives(
    chains: Chains, request: Request, budget: Budget, practices: Sequence[Alternative]
) -> list[Alternative]:
    """Return what is best for the other objectives.

    What is compared with comes first: it costs little, and what the solver proposes is
    only traced where it can be better.
    """
    rows = []
    for label, objective in OBJECTIVES:
        given = objective == "batch_size" and request.batch_size is not None
        if objective == request.objective or given:
            continue
        asked = replace(request, objective=objective)
        tried = []
        if request.checkpointing == "auto" and chains.traces.subject.blocks:
            full = best_of_policy(chains, "full", asked, budget)
            judged_before = [full, *(row.estimate for row in practices)]
            tried = [each for each in judged_before if each.fits]
        solved = search(
            chains, asked, budget, most_rounds=OBJECTIVE_ROUNDS, known=tried
        ).estimate
        found = best([*tried, *([solved] if solved is not None else [])], asked)
        if found is not None:
            rows.append(Alternative(label=label, estimate=found, fits=True))
    return rows


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


def does_not_fit(
    chains: Chains,
    request: Request,
    least: Estimate,
    budget: Budget,
    floor_bytes: int,
) -> DoesNotFitError:
    """Return the error: what is needed, what is largest and what would help.

    Args:
        chains: What the lowest peak was found on.
        request: As it was asked for.
        least: The lowest peak.
        budget: What it had to fit into.
        floor_bytes: As in the error: the least optimizer step of all that was tried.
    """
    return DoesNotFitError(
        needed_bytes=least.reserved_bytes,
        usable_bytes=budget.usable_bytes,
        largest=max(least.at_peak_bytes.items(), key=lambda item: item[1]),
        floor_bytes=floor_bytes,
        suggestions=tuple(suggestions(chains, request, budget, least)),
        notes=chains.traces.subject.notes,
    )


class Change(NamedTuple):
    """What a user may do otherwise: ``arguments`` of ``plan``, and what they mean."""

    arguments: dict[str, object]
    chains: Chains
    request: Request
    budget: Budget


def suggestions(
    chains: Chains, request: Request, budget: Budget, least: Estimate
) -> Iterator[Suggestion]:
    """Yield what would fit of what was not allowed, each solved for itself.

    What frees less than ``least`` is too large by is not tried.
    """
    missing = least.reserved_bytes - budget.usable_bytes
    for change in _changes(chains, request, budget):
        frees = FREES.get(next(iter(change.arguments)))
        if frees is not None and least.at_peak_bytes.get(frees, 0) < missing:
            continue
        try:
            found = least_of(change.chains, change.request, change.budget)
        except (InputError, TraceError) as error:
            chains.traces.log.append(f"{change.arguments} is no advice: {error}")
            continue
        if found is not None and found.fits:
            yield suggestion(change.arguments, found)


def suggestion(arguments: dict[str, object], found: Estimate) -> Suggestion:
    """Return a change that fits as what a user is told."""
    if "host_ram" in arguments:
        arguments = {"host_ram": f"{-(-found.host_bytes // 2**30)}GiB"}
    keeps = {"checkpointing", "batch_size", "host_ram", "optimizer_in_backward"}
    return Suggestion(
        arguments=arguments,
        recipe=found.recipe,
        peak_bytes=found.reserved_bytes,
        host_bytes=found.host_bytes,
        samples_per_s=found.samples_per_s,
        changes_training=not keeps.issuperset(arguments),
    )


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


def _changes(chains: Chains, request: Request, budget: Budget) -> Iterator[Change]:
    setting = replace(chains.setting, loss_chunks=1)

    def change(arguments: dict[str, object], **fields: Any) -> Change:  # noqa: ANN401
        changed = Chains(chains.traces, replace(setting, **fields))
        return Change(arguments, changed, request, budget)

    if request.batch_size is not None and request.batch_size > 1:
        one = replace(request, batch_size=1)
        yield change({"batch_size": 1})._replace(request=one)
    if request.checkpointing != "auto":
        auto = replace(request, checkpointing="auto")
        yield change({"checkpointing": "auto"})._replace(request=auto)
    elif setting.host_ram_bytes is not None:
        unlimited = replace(budget, host_ram_bytes=None)
        more = change({"host_ram": None}, host_ram_bytes=None)
        yield more._replace(budget=unlimited)
    if can_step_in_backward(setting):
        inside = {"optimizer_in_backward": True}
        yield change({**inside}, accumulation=None, **inside)
    optimizers = [name for name in OPTIMIZERS if name != setting.optimizer]
    bf16 = PRECISIONS["bf16"]
    subject = chains.traces.subject
    capable = subject.gpu.compute_capability >= bf16.needs_capability
    for name in optimizers:
        yield change({"optimizer": name}, optimizer=name)
    if capable and setting.precision != bf16.name:
        half = {"precision": bf16.name}
        both = {**half, "optimizer": optimizers[0]}
        yield change({**half}, **half)
        yield change({**both}, **both)
    if all(parameter.requires_grad for parameter in subject.model.parameters()):
        adapted = with_lora(chains)
        if adapted is not None:
            yield Change({"method": "lora"}, adapted, request, budget)
