"""A plan from start to end: every precision searched, the best kept, evidence gathered."""

from __future__ import annotations

import importlib.metadata
import time
from typing import TYPE_CHECKING

import torch

from budgetfit.core.plan import Estimate, Plan
from budgetfit.planning.chains import Chains, Setting, every_block
from budgetfit.planning.judge import judge
from budgetfit.planning.search import Found, Request, judged, search
from budgetfit.planning.traces import Traces
from budgetfit.planning.what_if import alternatives, does_not_fit
from budgetfit.solvers.uniform_segments import chen_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.recipe import Recipe
    from budgetfit.planning.subject import Subject


def make_plan(  # noqa: PLR0913 - one value each, all needed
    subject: Subject,
    budget: Budget,
    request: Request,
    *,
    precisions: Sequence[str],
    optimizer: str,
    effective_batch_size: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Return the best judged plan over all ``precisions``.

    Raises:
        DoesNotFitError: If not even batch 1 with everything recomputed fits.
        TraceError: If the model cannot be traced.
    """
    started = time.perf_counter()
    traces = Traces(subject, progress)
    found: list[tuple[Chains, Found]] = []
    for precision in precisions:
        chains = Chains(
            traces,
            Setting(
                precision=precision,
                optimizer=optimizer,
                effective_batch_size=effective_batch_size,
            ),
        )
        found.append((chains, search(chains, request, budget)))
    fitting = [row for row in found if row[1].estimate is not None]
    if not fitting:
        raise does_not_fit(found[0][0], request, budget)
    chains, best = min(fitting, key=lambda row: _rank(row[1], request))
    assert best.estimate is not None  # noqa: S101 - filtered above
    _say(progress, "judging the alternatives")
    others = alternatives(chains, request, budget, best.estimate)
    return Plan(
        recipe=best.estimate.recipe,
        estimate=best.estimate,
        budget=budget,
        gpu=subject.gpu,
        model=subject.summary(),
        alternatives=others,
        warnings=subject.notes,
        provenance={
            **versions(),
            "solver": best.explanation,
            "rounds": list(best.rounds),
            "traces": traces.log,
            "seconds": round(time.perf_counter() - started, 2),
            "allocated, reserved": "replay of the traced step through PyTorch's "
            "caching allocator",
            "process": "reserved + estimated CUDA context",
            "times": "roofline of the card's rates",
            "card": subject.gpu.source,
            "notes": list(subject.notes),
        },
    )


def make_estimate(
    subject: Subject,
    recipe: Recipe,
    budget: Budget | None,
    *,
    context_bytes: int,
    keep_own_checkpointing: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Estimate:
    """Return the memory and time of one given recipe; nothing is decided."""
    traces = Traces(subject, progress)
    trace = traces.once(recipe, keep_own_checkpointing=keep_own_checkpointing)
    return judge(
        trace,
        recipe,
        subject.gpu,
        budget,
        context_bytes=context_bytes,
        notes=subject.notes,
    )


def segments_of(
    subject: Subject, policy: str, setting: Setting, batch_size: int
) -> Recipe:
    """Return the recipe of a named checkpointing policy, Chen's included."""
    if policy == "sqrt":
        chains = Chains(Traces(subject), setting)
        segments = chen_segments(chains.at(batch_size))
    else:
        segments = every_block(subject.blocks) if policy == "full" else ()
    return setting.recipe(batch_size, segments)


def versions() -> dict[str, str]:
    """Return what ran: the versions that a plan's numbers belong to."""
    result = {"torch": torch.__version__}
    for name in ("transformers", "budgetfit"):
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            result[name] = "not installed"
    return result


def _rank(found: Found, request: Request) -> tuple[float, ...]:
    estimate = found.estimate
    assert estimate is not None  # noqa: S101 - only fitting ones are ranked
    per_sample = estimate.step_ms / estimate.recipe.effective_batch_size
    return {
        "throughput": (per_sample, estimate.reserved_bytes),
        "batch_size": (-estimate.recipe.batch_size, per_sample),
        "memory": (estimate.reserved_bytes, per_sample),
    }[request.objective]


def _say(progress: Callable[[str], None] | None, text: str) -> None:
    if progress is not None:
        progress(text)


__all__ = ["judged", "make_estimate", "make_plan", "segments_of", "versions"]
