"""Training steps with evaluations between them, as one trace to replay.

Training decides what the allocator has cached when an evaluation begins, and the
evaluation what it has cached when training goes on: both count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.core.step_trace import Affine
from budgetfit.memory.replay_schedule import append_next_step
from budgetfit.tracing.recording.evaluation import append_evaluation, batch_tensor_bytes

if TYPE_CHECKING:
    from budgetfit.core.loop import Loop
    from budgetfit.core.recipe import Recipe
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.traces.session import TraceSession

EVALUATIONS: Final = 2  # the second one meets what training did after the first


def with_evaluations(
    traces: TraceSession, training: StepTrace, recipe: Recipe, loop: Loop
) -> StepTrace | None:
    """Return a training trace with evaluations and a step after each.

    None if the loop does not evaluate. A model that cannot be traced in evaluation mode
    raises what it raises.

    Raises:
        ValueError: The training's last step cannot be repeated.
    """
    samples = loop.evaluation_batch_size
    if not samples:
        return None
    evaluation = _at(traces.evaluation(recipe.precision, loop), samples)
    held: tuple[int, ...] = ()
    if loop.kind == "run":  # the loop of the user holds its batches, a Run does not
        held = (
            batch_tensor_bytes(training, recipe.batch_size)
            * recipe.gradient_accumulation_steps
        )
    step, trace = training.phases[-1].step, training
    for _ in range(EVALUATIONS):
        trace = append_evaluation(trace, evaluation, held)
        trace = append_next_step(trace, step)
        step = trace.phases[-1].step
    return replace(trace, batch_sizes=training.batch_sizes)


def _at(trace: StepTrace, samples: int) -> StepTrace:
    """Return a trace whose sizes are those at ``samples``, whatever is asked."""
    return replace(
        trace,
        fixed_bytes=trace.fixed_bytes + trace.bytes_per_sample * samples,
        bytes_per_sample=trace.bytes_per_sample * 0,
        scratch=tuple(
            row._replace(arguments=tuple(Affine(a.at(samples), 0) for a in row.arguments))
            for row in trace.scratch
        ),
    )
