"""The first trace of a model: whether it runs, and which blocks can be wrapped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.batches.batch_tree import batch_size_of, describe_batch
from budgetfit.batches.sample_count import dimensions_of
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.errors import InputError, TraceError
from budgetfit.planning.profiling.block_chain import Chains, Setting
from budgetfit.planning.profiling.overwritten_blocks import without_overwriting_blocks
from budgetfit.planning.profiling.precision_fallback import made_or_instead
from budgetfit.traces.session import TRACED_BATCH_SIZES, Traces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.recipe import Recipe
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.workload.workload import Subject


def chains_of_each(
    subject: Subject,
    precisions: Sequence[str],
    setting: Setting,
    instead: str | None,
    progress: Callable[[str], None] | None,
) -> list[Chains]:
    """Return the model's chains in each precision, all with the same traces.

    Args:
        subject: What is planned for.
        precisions: The first of them tells whether the model runs and which blocks can
            be wrapped.
        setting: The rest of a recipe; its precision is the first.
        instead: The one precision for a model that does not run in the first.
        progress: As in ``plan``.

    Raises:
        TraceError: If the model cannot be traced.
    """

    def run_in(subject: Subject, setting: Setting) -> Chains:
        return Chains(settled(Traces(subject, progress), setting), setting)

    first = made_or_instead(run_in, subject, setting, instead)
    if first.setting.precision != setting.precision:
        return [first]
    return [
        Chains(first.traces, replace(setting, precision=precision))
        for precision in precisions
    ]


def settled(traces: Traces, setting: Setting) -> Traces:
    """Return traces whose blocks really run once per forward, in that order.

    Blocks that never run, or several times (shared layers), cannot be wrapped. The
    program is one that the search will ask for in any case.

    Raises:
        InputError: If nothing in it grows with the batch.
    """
    subject = traces.subject
    trace = traces.of(setting.recipe(TRACED_BATCH_SIZES[0]))
    _check_that_it_grows(trace, subject)
    ran = trace.blocks
    once = tuple(name for name in ran if ran.count(name) == 1)
    if once == subject.blocks:
        return without_overwriting_blocks(traces, setting)
    notes = subject.notes
    left_out = len(subject.blocks) - len(once)
    if left_out:
        notes = (
            *notes,
            (
                f"{left_out} of {len(subject.blocks)} blocks do not run exactly once "
                "per forward and are always kept"
            ),
        )
    traces = Traces(replace(subject, blocks=once, notes=notes), traces.progress)
    return without_overwriting_blocks(traces, setting)


def _check_that_it_grows(trace: StepTrace, subject: Subject) -> None:
    """Refuse a batch of which other parts than samples were resized.

    Any batch size would fit then, and be said to be fast.
    """
    made = trace.bytes_per_sample[trace.category != CATEGORIES.index("batch")]
    if len(trace.batch_sizes) == 1 or (made > 0).any():
        return
    raise _does_not_grow(subject)


def check_estimate_grows(
    traces: Traces, trace: StepTrace, recipe: Recipe, *, keep_own_checkpointing: bool
) -> None:
    """Refuse for an estimate what ``settled`` refuses for a plan.

    That takes a trace at the example's own size, so it is looked at only where a given
    batch was resized and some of its tensors stayed as they were.

    Args:
        traces: Of the subject.
        trace: Of the recipe.
        recipe: What is estimated.
        keep_own_checkpointing: As for the trace.

    Raises:
        InputError: If nothing in the step grows with the batch.
    """
    subject = traces.subject
    if len(trace.batch_sizes) > 1:
        _check_that_it_grows(trace, subject)
        return
    given = batch_size_of(subject.batch, dims=subject.batch_dims)
    found = dimensions_of(subject.batch, subject.batch_dims)
    stayed = [
        name
        for name, dim in found.items()
        if dim is None and not subject.batch_dims.is_named(name)
    ]
    if subject.remake is not None or recipe.batch_size == given or not stayed:
        return
    as_given = replace(recipe, batch_size=given)
    try:
        other = traces.once(as_given, keep_own_checkpointing=keep_own_checkpointing)
    except TraceError:
        return  # it is no word about the size that was asked about
    if _made_bytes(trace, recipe.batch_size) == _made_bytes(other, given):
        raise _does_not_grow(subject)


def _made_bytes(trace: StepTrace, batch_size: int) -> int:
    """Return the bytes of all that a step makes but its batch."""
    made = trace.category != CATEGORIES.index("batch")
    sizes = trace.fixed_bytes + trace.bytes_per_sample * batch_size
    return int(sizes[made].sum())


def _does_not_grow(subject: Subject) -> InputError:
    batch = describe_batch(subject.batch)
    shapes = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in batch.items())
    samples = batch_size_of(subject.batch, dims=subject.batch_dims)
    found = dimensions_of(subject.batch, subject.batch_dims)
    name = next((name for name, dim in found.items() if dim is None), next(iter(batch)))
    return InputError(
        f"The model makes the same from any batch size: of this batch ({shapes}) the "
        f"parts with {samples} rows were taken as samples, and those do not matter to "
        "it. Give a batch whose inputs have one row for each sample, or say which "
        f'dimension counts them: batch_dims={{"{name}": 0}} (--batch-dims {name}=0).'
    )
