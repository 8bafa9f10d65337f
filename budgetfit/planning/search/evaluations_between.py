"""Training steps with evaluations between them, as one trace to replay.

Training decides what the allocator has cached when an evaluation begins, and the
evaluation what it has cached when training goes on: both count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from budgetfit.core.loop import Loop
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import CATEGORIES, Phase, StepTrace
from budgetfit.memory.replay_schedule import append_next_step
from budgetfit.tracing.recording.evaluation import append_evaluation, batch_tensor_bytes

if TYPE_CHECKING:
    from budgetfit.traces.session import TraceSession

EVALUATIONS: Final = 2  # the second one meets what training did after the first
# Each may begin with an emptied cache, as ``evaluation_batch_size`` has it, and so may
# the training after it.
TURNS: Final = 2 * EVALUATIONS


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
    evaluation = traces.evaluation(recipe.precision, loop).at_samples(samples)
    held: tuple[int, ...] = ()
    if loop.kind == "run":  # the loop of the user holds its batches, a Run does not
        held = (
            batch_tensor_bytes(training, recipe.batch_size)
            * recipe.gradient_accumulation_steps
        )
    step, trace = training.phases[-1].step, training
    for number in range(1, EVALUATIONS + 1):
        released = _live_gradients(trace) if loop.kind == "lightning" else []
        trace = append_evaluation(_freeing(trace, released), evaluation, held)
        trace = append_next_step(trace, step, number, released)
    return replace(trace, batch_sizes=training.batch_sizes)


def _live_gradients(trace: StepTrace) -> list[int]:
    """Return the gradients that are alive at the end."""
    # Lightning has them until the next backward, and drops them before a validation
    # (2.6, ``LightningModule.on_validation_model_zero_grad``).
    alive = np.zeros(len(trace.category), np.int64)
    np.add.at(alive, np.abs(trace.events) - 1, np.sign(trace.events))
    gradients = trace.category == CATEGORIES.index("gradients")
    return [int(storage) for storage in np.flatnonzero((alive > 0) & gradients)]


def _freeing(trace: StepTrace, storages: list[int]) -> StepTrace:
    """Return the trace with storages freed at its end, a phase of its own."""
    if not storages:
        return trace
    added = np.array([-storage - 1 for storage in storages], trace.events.dtype)
    last = trace.phases[-1]
    freed = Phase("forward", last.step + 1, 0, last.end, last.end + len(added))
    return replace(
        trace,
        events=np.concatenate([trace.events, added]),
        phases=(*trace.phases, freed),
    )
