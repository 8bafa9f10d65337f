"""The usual practices beside the plan, and what would help when nothing fits."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.core.errors import DoesNotFitError, InputError, Suggestion, TraceError
from budgetfit.core.plan import Alternative
from budgetfit.core.precision import PRECISIONS
from budgetfit.planning.chains import Chains, every_block
from budgetfit.planning.search import Request, judged, search
from budgetfit.solvers.chain_dp import lowest_peak
from budgetfit.solvers.problem import Problem

if TYPE_CHECKING:
    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.core.recipe import Segment
    from budgetfit.planning.chains import Setting

PRACTICES = (
    ("everything kept", "none"),
    ("every block recomputed", "full"),
    ("Chen's sqrt(n) segments", "sqrt"),
)
# Levers that change training: only suggested, with what each would need.
OPTIMIZERS = ("adafactor", "sgd")


def alternatives(
    chains: Chains, request: Request, budget: Budget, plan: Estimate
) -> tuple[Alternative, ...]:
    """Return the usual practices, each at its best batch, judged like the plan."""
    rows = []
    for label, policy in PRACTICES:
        if policy != "none" and not chains.traces.subject.blocks:
            continue
        found = search(chains, replace(request, checkpointing=policy), budget).estimate
        if found is None:
            size = request.batch_size or 1
            chain = chains.at(size)
            segments = (
                every_block(chains.traces.subject.blocks) if policy == "full" else ()
            )
            if policy == "sqrt":
                from budgetfit.solvers.uniform_segments import (  # noqa: PLC0415
                    chen_segments,
                )

                segments = chen_segments(chain)
            found = judged(chains, chains.setting.recipe(size, segments), budget)
        if found.recipe == plan.recipe:
            continue
        rows.append(Alternative(label=label, estimate=found, fits=bool(found.fits)))
    return tuple(rows)


def smallest(chains: Chains, batch_size: int, budget: Budget) -> Estimate:
    """Return the lowest peak that recomputing alone can reach at a batch size."""
    chain = chains.at(batch_size)
    solution = lowest_peak(Problem(chain=chain, budget_bytes=sys.maxsize))
    segments = solution.segments
    if segments is None:
        segments = every_block(chains.traces.subject.blocks)
    return judged(chains, chains.setting.recipe(batch_size, segments), budget)


def does_not_fit(chains: Chains, request: Request, budget: Budget) -> DoesNotFitError:
    """Return the error: what is needed, what is largest and what would help."""
    size = request.batch_size or 1
    least = smallest(chains, size, budget)
    largest = max(least.at_peak_bytes.items(), key=lambda item: item[1])
    return DoesNotFitError(
        needed_bytes=least.reserved_bytes,
        usable_bytes=budget.usable_bytes,
        largest=largest,
        suggestions=tuple(_suggestions(chains, size, least.recipe.segments, budget)),
    )


def _suggestions(
    chains: Chains, batch_size: int, segments: tuple[Segment, ...], budget: Budget
) -> list[Suggestion]:
    """Try what changes training, and keep what would fit; one trace each."""
    found = []
    for text, setting, size in _candidates(chains, batch_size):
        recipe = setting.recipe(size, segments)
        try:
            estimate = judged(Chains(chains.traces, setting), recipe, budget)
        except (InputError, TraceError):
            continue  # the model cannot run that way, so it is no advice
        if estimate.fits:
            found.append(
                Suggestion(text=text, recipe=recipe, peak_bytes=estimate.reserved_bytes)
            )
    return found


def _candidates(chains: Chains, batch_size: int) -> list[tuple[str, Setting, int]]:
    setting = chains.setting
    rows: list[tuple[str, Setting, int]] = []
    if batch_size > 1:
        rows.append(("batch_size=1", replace(setting, accumulation=None), 1))
    precisions = []
    if (
        chains.traces.subject.gpu.compute_capability
        >= PRECISIONS["bf16"].needs_capability
    ):
        precisions.append("bf16")
    rows += [
        (f'optimizer="{name}"', replace(setting, optimizer=name), batch_size)
        for name in OPTIMIZERS
        if name != setting.optimizer
    ]
    for name in precisions:
        if name != setting.precision:
            rows.append(
                (f'precision="{name}"', replace(setting, precision=name), batch_size)
            )
            rows += [
                (
                    f'precision="{name}", optimizer="{optimizer}"',
                    replace(setting, precision=name, optimizer=optimizer),
                    batch_size,
                )
                for optimizer in OPTIMIZERS[:1]
            ]
    return rows
