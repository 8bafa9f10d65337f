"""The largest evaluation batch size that fits between training steps.

Evaluation saves no activations, so its batch may be several times the training's; but
it holds the full logits and their loss, accelerate converts them to fp32 in mixed
precision, and an ordinary loop, ``outputs = model(**batch)``, keeps the outputs of the
previous batch until the next ones are assigned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from budgetfit.core.budget import Budget
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import StepTrace
from budgetfit.memory.replay import ReplayAfterTraining
from budgetfit.solvers.batch_size_grid import largest_fitting
from budgetfit.tracing.recording.evaluation import append_evaluation, batch_tensor_bytes

if TYPE_CHECKING:
    from budgetfit.traces.session import TraceSession

MAX_EVALUATION_BATCH = 1 << 20  # where memory does not grow with the batch size


def evaluation_batch_size(
    traces: TraceSession, recipe: Recipe, budget: Budget
) -> int | None:
    """Return the largest evaluation batch size that fits between steps of ``recipe``.

    Evaluation means: ``model.eval()``, ``torch.no_grad()``, the recipe's autocast,
    labels, two batches one after the other. Weights and optimizer states stay,
    gradients are None, and all micro-batches of the update are on the device, as with
    transformers' Trainer. It fits when the replay of training steps followed by
    evaluations stays within the budget. The allocator may empty its cache once, when
    evaluation begins, but not at every batch.

    Returns:
        Samples; 0 if not even one fits; None if unknown: there are several GPUs, the
        model fails in evaluation mode, sizes are not affine in the batch size, or
        training itself does not fit.
    """
    if recipe.parallelism is not None:
        return None  # weights are gathered there, too
    try:
        evaluation = traces.evaluation(recipe.precision)
    except Exception as error:  # noqa: BLE001 - any model's own, in evaluation mode
        text = " ".join(str(error).split())[:200]
        traces.log.append(f"evaluation is not traced: {type(error).__name__}: {text}")
        return None
    trained = traces.exact(recipe)
    held = (
        batch_tensor_bytes(trained, recipe.batch_size)
        * recipe.gradient_accumulation_steps
    )
    trace = append_evaluation(trained, evaluation, held)
    training = ReplayAfterTraining(
        trained,
        recipe.batch_size,
        traces.workload.gpu,
        budget,
        micro_steps=recipe.gradient_accumulation_steps,
        followed=trace,
    )

    def fits(*then_batch_sizes: int) -> bool:
        retries = training.retries(then_batch_sizes)
        return retries is not None and retries <= 1

    if not fits():
        return None
    return largest_fitting(
        lambda samples: fits(samples, samples),
        evaluation.largest_batch(_upper_bound(trace, recipe, budget.usable_bytes)),
    )


def _upper_bound(trace: StepTrace, recipe: Recipe, limit_bytes: int) -> int:
    """Return the batch size at which live bytes alone would fill the device."""
    phase = trace.phases[-1]
    before, during = trace.events[: phase.start], trace.events[phase.start : phase.end]
    sizes = trace.fixed_bytes + trace.bytes_per_sample * recipe.batch_size
    kept = int(_signed(sizes, before).sum())
    fixed = np.cumsum(_signed(trace.fixed_bytes, during))
    slope = np.cumsum(_signed(trace.bytes_per_sample, during))
    grows = slope > 0
    if not grows.any():
        return MAX_EVALUATION_BATCH
    room = (limit_bytes - kept - fixed[grows]) // slope[grows]
    return int(min(MAX_EVALUATION_BATCH, max(0, room.min())))


def _signed(sizes: np.ndarray, events: np.ndarray) -> np.ndarray:
    """Return each event's change of the live bytes."""
    return np.sign(events).astype(np.int64) * sizes[np.abs(events) - 1]
