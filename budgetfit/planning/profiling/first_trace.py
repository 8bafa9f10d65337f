"""The first trace of a model: does it run, and which blocks can be checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from budgetfit.applying.checkpointing.mutated_attributes import leads_to_iterator
from budgetfit.applying.loss.call_model import model_arguments
from budgetfit.batches.batch_tree import batch_size_of, describe_batch
from budgetfit.batches.sample_count import sample_dimensions
from budgetfit.core.loop import RUN, Loop
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import CATEGORIES, StepTrace
from budgetfit.errors import InputError, TraceError
from budgetfit.planning.profiling.block_chain import (
    BlockChain,
    TrainingSettings,
    checkpoint_every_block,
)
from budgetfit.traces.session import TraceSession
from budgetfit.traces.tracer import TRACED_BATCH_SIZES
from budgetfit.tracing.recording.inplace_inputs import blocks_mutating_inputs
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    from torch import nn


Made = TypeVar("Made")
_INPLACE_ERROR: Final = "modified by an inplace operation"  # torch's RuntimeError


def block_chain_per_precision(
    traces: TraceSession,
    precisions: Sequence[str],
    settings: TrainingSettings,
    fallback_precision: str | None,
    *,
    only_at: int | None = None,
) -> list[BlockChain]:
    """Return the model's block chain in each precision, all with the same traces.

    Args:
        traces: Of what to plan for, or of the same model.
        precisions: The first of them decides whether the model runs and which blocks
            can be checkpointed.
        settings: The rest of a recipe; its precision is the first.
        fallback_precision: For a model that does not run in the first precision.
        only_at: As for ``with_checkpointable_blocks``.

    Raises:
        TraceError: If the model cannot be traced.
    """

    def run_in(workload: Workload, settings: TrainingSettings) -> BlockChain:
        own = traces.of_same_model(workload)
        return BlockChain(
            with_checkpointable_blocks(own, settings, only_at=only_at), settings
        )

    first = with_precision_fallback(
        run_in, traces.workload, settings, fallback_precision
    )
    if first.settings.precision != settings.precision:
        return [first]
    return [
        BlockChain(first.traces, replace(settings, precision=precision))
        for precision in precisions
    ]


def fallback_for(precision: str | Sequence[str]) -> str | None:
    """Return the fallback of a requested precision; None if the user chose one.

    >>> fallback_for("auto"), fallback_for("bf16-mixed")
    ('fp32', None)
    """
    return "fp32" if precision == "auto" else None


def with_precision_fallback(
    make: Callable[[Workload, TrainingSettings], Made],
    workload: Workload,
    settings: TrainingSettings,
    fallback_precision: str | None,
) -> Made:
    """Return ``make(workload, settings)``, retried in ``fallback_precision``.

    The retry happens if the first precision cannot be traced; the workload then has a
    note that says so. See docs/decisions/0026-auto-precision-falls-back.md.

    Raises:
        TraceError: The first one, if there is no fallback or it fails as well.
    """
    try:
        return make(workload, settings)
    except TraceError as error:
        if fallback_precision is None or fallback_precision == settings.precision:
            raise
        note = f"{fallback_precision} instead of {settings.precision}, because: {error}"
        noted = replace(workload, notes=(*workload.notes, note))
        try:
            return make(noted, replace(settings, precision=fallback_precision))
        except TraceError:
            raise error from None


def with_checkpointable_blocks(
    traces: TraceSession, settings: TrainingSettings, *, only_at: int | None = None
) -> TraceSession:
    """Return traces of the blocks that run exactly once per forward, in that order.

    Blocks that never run, or several times (shared layers), or inside of a transform of
    ``torch.func``, cannot be checkpointed, nor those that are given a container that
    changes: when they ran again they would find what it has become. The search needs
    this trace anyway.

    Args:
        traces: Of the workload.
        settings: The rest of a recipe.
        only_at: The batch size, where no other is of interest: a trace of one size
            takes half the time of one that is affine in it.

    Raises:
        InputError: If no tensor grows with the batch size.
    """
    workload = traces.workload
    if only_at is not None and _every_block_recomputes(traces, settings, only_at):
        return traces
    trace = _traced(traces, settings, (), only_at)
    _check_scales(trace, workload)
    ran = trace.blocks
    once = tuple(name for name in ran if ran.count(name) == 1)
    changing: frozenset[str] = frozenset()
    if trace.gives_containers:
        recipe = settings.recipe(only_at or TRACED_BATCH_SIZES[0])
        changing = traces.blocks_with_changed_containers(recipe).intersection(once)
    moving = _blocks_with_iterators(workload, once)
    if once == workload.blocks and not changing and not moving:
        return without_inplace_blocks(traces, settings, only_at=only_at)
    notes = workload.notes
    left_out = len(workload.blocks) - len(once)
    if left_out:
        notes = (
            *notes,
            (
                f"{left_out} of {len(workload.blocks)} blocks do not run exactly once "
                "per forward, or inside of torch.func: they are always kept, and what "
                "those that do not run would keep is not in the prediction"
            ),
        )
    if changing:
        notes = (
            *notes,
            (
                f"{len(changing)} of {len(workload.blocks)} blocks change a container "
                "that they are given (a dict, list or object), or it changes after "
                "they ran, and are always kept"
            ),
        )
    if moving:
        notes = (
            *notes,
            (
                f"{len(moving)} of {len(workload.blocks)} blocks have an iterator, "
                "which a recomputation would move on a second time, and are always kept"
            ),
        )
    kept = tuple(name for name in once if name not in changing | moving)
    traces = TraceSession(
        replace(workload, blocks=kept, notes=notes), traces.tracer.progress
    )
    return without_inplace_blocks(traces, settings, only_at=only_at)


def _every_block_recomputes(
    traces: TraceSession, settings: TrainingSettings, batch_size: int
) -> bool:
    """Whether the trace with every block recomputed shows that all of them can be."""
    # Where it does not, the one with everything kept says why.
    workload = traces.workload
    segments = checkpoint_every_block(workload.blocks)
    try:
        trace = _traced(traces, settings, segments, batch_size)
    except TraceError:
        return False
    _check_scales(trace, workload)
    once = trace.blocks == workload.blocks and not trace.gives_containers
    return once and not _blocks_with_iterators(workload, workload.blocks)


def _blocks_with_iterators(workload: Workload, blocks: Sequence[str]) -> set[str]:
    model = workload.model
    return {name for name in blocks if leads_to_iterator(model.get_submodule(name))}


def _traced(
    traces: TraceSession,
    settings: TrainingSettings,
    segments: tuple[Segment, ...],
    only_at: int | None,
) -> StepTrace:
    """Return the trace of some segments, affine unless ``only_at`` a batch size."""
    recipe = settings.recipe(only_at or TRACED_BATCH_SIZES[0], segments)
    return traces.affine(recipe) if only_at is None else traces.exact(recipe)


def without_inplace_blocks(
    traces: TraceSession, settings: TrainingSettings, *, only_at: int | None = None
) -> TraceSession:
    """Return traces without blocks that mutate their input in place, with a note."""
    # Such blocks cannot be recomputed. The model is examined only if the trace with
    # every block recomputed fails for this reason; the search needs that trace anyway
    # and handles its other failures.
    workload = traces.workload
    if not workload.blocks:
        return traces
    try:
        _traced(traces, settings, checkpoint_every_block(workload.blocks), only_at)
    except TraceError as error:
        if _INPLACE_ERROR not in f"{error} {error.__cause__}":
            return traces
    else:
        return traces

    def call(model: nn.Module, batch: Any) -> object:  # noqa: ANN401
        args, kwargs = model_arguments(model, batch, for_loss=workload.loss is not None)
        return model(*args, **kwargs)

    found = blocks_mutating_inputs(
        workload.model, workload.batch, workload.blocks, call
    )
    if not found:
        return traces
    note = (
        f"{len(found)} of {len(workload.blocks)} blocks change their input in place "
        "and are always kept"
    )
    kept = tuple(name for name in workload.blocks if name not in found)
    others = replace(workload, blocks=kept, notes=(*workload.notes, note))
    return TraceSession(others, traces.tracer.progress)


def _check_scales(trace: StepTrace, workload: Workload) -> None:
    """Check that activations grow with the batch size."""
    # They do not where a dimension other than samples was resized: any batch size would
    # seem to fit.
    made = trace.bytes_per_sample[trace.category != CATEGORIES.index("batch")]
    if len(trace.batch_sizes) == 1 or (made > 0).any():
        return
    raise _does_not_grow(workload)


def check_estimate_scales(
    traces: TraceSession,
    trace: StepTrace,
    recipe: Recipe,
    *,
    keep_own_checkpointing: bool,
    loop: Loop = RUN,
) -> None:
    """Check for an estimate that activations grow with the batch size."""
    # This takes a second trace, at the example's own size, and is done only where a
    # given batch was resized and some of its tensors kept their shape.
    workload = traces.workload
    if len(trace.batch_sizes) > 1:
        _check_scales(trace, workload)
        return
    given = batch_size_of(workload.batch, dims=workload.batch_dims)
    found = sample_dimensions(workload.batch, workload.batch_dims)
    stayed = [
        name
        for name, dim in found.items()
        if dim is None and not workload.batch_dims.is_named(name)
    ]
    if workload.remake is not None or recipe.batch_size == given or not stayed:
        return
    as_given = replace(recipe, batch_size=given)
    try:
        other = traces.exact(
            as_given, keep_own_checkpointing=keep_own_checkpointing, loop=loop
        )
    except TraceError:
        return  # says nothing about the requested size
    if _made_bytes(trace, recipe.batch_size) == _made_bytes(other, given):
        raise _does_not_grow(workload)


def _made_bytes(trace: StepTrace, batch_size: int) -> int:
    """Return the bytes of all storages of a step except its batch."""
    made = trace.category != CATEGORIES.index("batch")
    sizes = trace.fixed_bytes + trace.bytes_per_sample * batch_size
    return int(sizes[made].sum())


def _does_not_grow(workload: Workload) -> InputError:
    batch = describe_batch(workload.batch)
    shapes = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in batch.items())
    samples = batch_size_of(workload.batch, dims=workload.batch_dims)
    found = sample_dimensions(workload.batch, workload.batch_dims)
    name = next((name for name, dim in found.items() if dim is None), next(iter(batch)))
    return InputError(
        f"The model makes the same from any batch size: of this batch ({shapes}) the "
        f"parts with {samples} rows were taken as samples, and those do not matter to "
        "it. Give a batch whose inputs have one row for each sample, or say which "
        f'dimension counts them: batch_dims={{"{name}": 0}} (--batch-dims {name}=0).'
    )
