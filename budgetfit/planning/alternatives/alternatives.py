"""Alternatives to a plan: baselines, other objectives and changes of training.

Only the baselines that may be better than the plan are judged with it. The others do
not affect it and take longer. By the time they are read the model may have been
checkpointed, trained or moved. So a meta copy, made while planning, is traced then.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from budgetfit.applying.meta_copy import copy_to_meta
from budgetfit.applying.pytree import map_tensors
from budgetfit.core.plan import Alternative, Estimate, LazyAlternatives
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError, TraceError
from budgetfit.planning.alternatives.training_changes import training_change_rows
from budgetfit.planning.search.baselines import (
    BASELINES,
    EVERY_NTH,
    best_with_policy,
    policy_can_gain,
)
from budgetfit.planning.search.last_batch import with_last_batch_notes
from budgetfit.planning.search.loss_chunking import (
    best_for_objective,
    chunked_best,
    search_with_loss_chunks,
    search_without_host,
)
from budgetfit.planning.search.lowest_peak import lowest_judged
from budgetfit.planning.search.policies import (
    EVERY_N_POLICY,
    every_n_of_segments,
    ordinal,
)
from budgetfit.planning.search.search import SearchResult, can_gain
from budgetfit.planning.session import PlanningSession
from budgetfit.solvers.batch_size import Objective
from budgetfit.traces.swap_modules import modules_in
from budgetfit.tracing.isolation.torch_state import neutral_torch_state
from budgetfit.utils.garbage_collection import freeze_gc
from budgetfit.workload.workload import Workload

EXPANDING: Final = "with expandable segments"
ROOM_FOR_GRADIENTS: Final = "with room for accumulation"
MIN_GAIN: Final = 0.02  # of the plan's speed, for expandable segments
COMPILED: Final = "with torch.compile (blocks)"
_COMPILED_NOTE: Final = (
    'compile="blocks": shown with the batch and recomputed blocks of this plan; a plan '
    "made with it may choose others; the first step compiles, which takes about a "
    "minute"
)
OBJECTIVES: Final[tuple[tuple[str, Objective], ...]] = (
    ("fastest", "throughput"),
    ("largest batch", "batch_size"),
    ("lowest memory", "memory"),
)


def deciding_baselines(
    session: PlanningSession, proposed: Estimate
) -> tuple[Alternative, ...]:
    """Return the baselines that may be better than the solver's proposal."""
    # Each is at its own best batch size, judged like the plan. By live bytes none of
    # them is faster than the solver's; Chen's segments and every n-th block can only
    # win time where they are faster than what the solver found to fit. So can the usual
    # ones where each is compiled for itself, which takes seconds: else they are judged
    # to be shown beside the plan.
    if session.request.objective != "throughput":
        return _baselines(session, BASELINES)
    count = len(BASELINES) - 1
    if session.settings.compile != "none":
        count = 0 if proposed.recipe.segments else 1  # judged already
    certain, others = BASELINES[:count], [*BASELINES[count:]]
    if proposed.recipe.segments:
        others.append(EVERY_NTH)
    rows = _baselines(session, certain)
    known = session.best_fitting([proposed, *(row.estimate for row in rows)])
    faster = [
        row for row in others if policy_can_gain(session, row[1], known or proposed)
    ]
    return (*rows, *_baselines(session, faster))


def rows_by_engine(found: Iterable[SearchResult]) -> tuple[Alternative, ...]:
    """Return the best recipes of ways to use several GPUs, where one fits."""
    rows = []
    for each in found:
        parallelism, estimate = each.session.settings.parallelism, each.estimate
        if parallelism is not None and estimate is not None:
            words = parallelism.describe(), estimate.recipe.reduction
            label = ", ".join(filter(None, words))
            rows.append(Alternative(label=label, estimate=estimate, fits=True))
    return tuple(rows)


def lazy_alternatives(
    session: PlanningSession,
    plan: Estimate,
    first: tuple[Alternative, ...],
    slower: Sequence[PlanningSession] = (),
) -> LazyAlternatives:
    """Return a plan's alternatives; all but ``first`` are evaluated on first access.

    ``slower``: sessions of engines that cannot be faster, one row each.
    """
    # Where the model cannot be copied to meta, all are evaluated at once.

    @functools.cache  # shared by the plan and its changed copies
    @neutral_torch_state()
    @freeze_gc()
    def find() -> tuple[Alternative, ...]:
        session.traces.tracer.progress("judging the alternatives")
        rest = remaining_alternatives(session, plan, first)
        rest += rows_by_engine(map(search_with_loss_chunks, slower))
        rest = with_last_batch_notes(session, plan, rest)
        if plan.recipe.parallelism is not None:
            return (*first, *rest)
        more = accumulating_rows(session, plan)
        return (*first, *rest, *faster_rows(session, plan), *more)

    kept = (
        None if session.traces.tracer.real_values else meta_workload(session.workload)
    )
    if kept is None:
        find()
    else:
        session.traces.tracer.workload = kept
    return LazyAlternatives(known=first, evaluate=find)


def meta_workload(workload: Workload) -> Workload | None:
    """Return the workload with a meta copy of its model and a copy of its batch."""
    # None if the model cannot be copied, or if the loss uses modules: they may belong
    # to the model, or change as it does.
    if modules_in(workload.loss):
        return None
    try:
        model = copy_to_meta(workload.model)
    except TraceError:
        return None
    # On the CPU: GPU memory is needed for training.
    batch = map_tensors(
        workload.batch, lambda x: x.clone() if x.is_meta else x.to("cpu", copy=True)
    )
    return replace(workload, model=model, batch=batch)


def remaining_alternatives(
    session: PlanningSession, plan: Estimate, first: tuple[Alternative, ...]
) -> tuple[Alternative, ...]:
    """Return the alternatives that cannot become the plan, after the rows ``first``."""
    shown = [row.label for row in first]
    # Where nothing has to be recomputed, every n-th block need not be either.
    usual = (*BASELINES, EVERY_NTH) if plan.recipe.segments else BASELINES
    if any(row.label == _named(EVERY_NTH[0], row.estimate, session) for row in first):
        usual = BASELINES
    rest = _baselines(session, [pair for pair in usual if pair[0] not in shown])
    rows = (
        *rest,
        *_without_host(session, plan),
        *_other_objectives(session, plan, [*first, *rest]),
    )
    if plan.recipe.parallelism is not None:  # the others are for one GPU
        return rows
    return (*rows, *compiled_row(session, plan), *training_change_rows(session, plan))


def _named(label: str, found: Estimate, session: PlanningSession) -> str:
    """Return the label with the number of ``n-th``."""
    n = every_n_of_segments(found.recipe.segments, session.workload.blocks)
    return label.replace("n-th", ordinal(n or 0))


def faster_rows(session: PlanningSession, plan: Estimate) -> tuple[Alternative, ...]:
    """Return a faster plan with expandable segments, where the solver says it may be.

    The updates are the same.
    """
    if session.budget.allocator.expandable_segments:
        return ()
    session = session.with_expandable_segments().changed(loss_chunks=1)
    if session.request.objective != "throughput" or not (
        can_gain(session, plan, MIN_GAIN)
        or can_gain(session, plan, MIN_GAIN, chunked_best)
    ):
        return ()
    tried = [search_with_loss_chunks(session).estimate]
    if session.request.checkpointing == "auto":
        tried.append(best_with_policy(session, "none"))
    found = session.best_fitting(each for each in tried if each)
    if found is None or found.samples_per_s <= (1 + MIN_GAIN) * plan.samples_per_s:
        return ()
    note = f'allocator="{session.budget.allocator.text}", not on Windows'
    row = Alternative(label=EXPANDING, estimate=found, fits=True, note=note)
    return with_last_batch_notes(session, plan, [row])


def accumulating_rows(
    session: PlanningSession, plan: Estimate
) -> tuple[Alternative, ...]:
    """Return the best plan with room for accumulated gradients, where the plan has not.

    Only without an effective batch size.
    """
    settings = session.settings
    if settings.effective_batch_size is not None or settings.optimizer_in_backward:
        return ()
    room = session.changed(accumulation=2, loss_chunks=1)
    try:
        if session.judge(replace(plan.recipe, gradient_accumulation_steps=2)).fits:
            return ()
        found = search_with_loss_chunks(room).estimate
    except TraceError:
        return ()
    if found is None:
        return ()
    note = "any number of micro-batches fits: plan it with effective_batch_size="
    label = ROOM_FOR_GRADIENTS
    return (Alternative(label=label, estimate=found, fits=True, note=note),)


def _without_host(session: PlanningSession, plan: Estimate) -> tuple[Alternative, ...]:
    """Return the best plan without offload to host memory, where the plan offloads."""
    if not plan.recipe.offloads_activations or plan.recipe.cpu_offload:
        return ()
    found = search_without_host(session)
    estimate = found.estimate or lowest_judged(found.session)
    label = "without host memory"
    return (Alternative(label=label, estimate=estimate, fits=bool(estimate.fits)),)


def _baselines(
    session: PlanningSession, shown: Sequence[tuple[str, str]]
) -> tuple[Alternative, ...]:
    blocks = session.workload.blocks
    rows = []
    for label, policy in shown:
        if policy != "none" and not blocks:
            continue
        found = best_with_policy(session, policy)
        if policy == EVERY_N_POLICY and not (
            found.fits and every_n_of_segments(found.recipe.segments, blocks)
        ):
            continue
        named = _named(label, found, session)
        rows.append(Alternative(label=named, estimate=found, fits=bool(found.fits)))
    return tuple(rows)


def _other_objectives(
    session: PlanningSession, plan: Estimate, baselines: Sequence[Alternative]
) -> list[Alternative]:
    """Return the best recipes for the other objectives."""
    rows = []
    judged = [plan, *(row.estimate for row in baselines)]
    request = session.request
    for label, objective in OBJECTIVES:
        given = objective == "batch_size" and request.batch_size is not None
        if objective == request.objective or given:
            continue
        asked = session.asking(objective=objective)
        found = best_for_objective(asked, judged)
        if found is not None:
            rows.append(Alternative(label=label, estimate=found, fits=True))
    return rows


def compiled_row(session: PlanningSession, plan: Estimate) -> tuple[Alternative, ...]:
    """Return the plan's recipe with compiled blocks, judged; none if it cannot be."""
    # Its batch size and segments are not searched for: that is a plan of its own.
    recipe = plan.recipe
    if recipe.compile != "none" or not session.workload.blocks:
        return ()
    try:
        found = session.judge(with_compiled_blocks(recipe))
    except (InputError, TraceError) as error:
        session.traces.log.append(f"{COMPILED} is not shown: {error}")
        return ()
    return (
        Alternative(
            label=COMPILED, estimate=found, fits=bool(found.fits), note=_COMPILED_NOTE
        ),
    )


def with_compiled_blocks(recipe: Recipe) -> Recipe:
    """Return a recipe with compiled blocks."""
    # Those under selective checkpointing would run eagerly, and are recomputed instead.
    segments = tuple(
        Segment(each.blocks) if each.mode == "selective" else each
        for each in recipe.segments
    )
    return replace(recipe, segments=segments, compile="blocks")
