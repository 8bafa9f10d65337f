"""The largest evaluation batch size that fits between training steps.

Evaluation saves no activations, so its batch may be several times the training's; but
it holds the full logits and their loss, accelerate converts them to fp32 in mixed
precision, and an ordinary loop, ``outputs = model(**batch)``, keeps the outputs of the
previous batch until the next ones are assigned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from budgetfit.applying.loss.call_model import evaluate_batch
from budgetfit.applying.precision import cast_batch
from budgetfit.applying.pytree import map_tensors
from budgetfit.applying.run.run import Run
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.memory.replay import ReplayAfterTraining
from budgetfit.planning.search.largest_batch import largest_fitting
from budgetfit.traces.loss_modules import FakedLoss
from budgetfit.tracing.fake.model_copy import silence_fake_tensor_log
from budgetfit.tracing.recording.evaluation import append_evaluation, batch_tensor_bytes
from budgetfit.tracing.recording.step_tracer import trace_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from budgetfit.applying.loss.call_model import Loss
    from budgetfit.core.budget import Budget
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.traces.session import TraceSession
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.raw_trace import RawTrace

MAX_EVALUATION_BATCH = 1 << 20  # where memory does not grow with the batch size
EVALUATED_BATCHES = 2  # one after the other


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
        Samples; 0 if not even one fits; None if unknown: the model fails in evaluation
        mode, sizes are not affine in the batch size, or training itself does not fit.
    """
    try:
        evaluation = evaluation_trace(traces, recipe.precision)
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
        trace,
        recipe.batch_size,
        traces.workload.gpu,
        limit_bytes=budget.usable_bytes,
        micro_steps=recipe.gradient_accumulation_steps,
    )

    def fits(*then_batch_sizes: int) -> bool:
        retries = training.retries(then_batch_sizes)
        return retries is not None and retries <= 1

    if not fits():
        return None
    return largest_fitting(
        lambda samples: fits(samples, samples),
        _upper_bound(trace, recipe, budget.usable_bytes),
    )


class _Evaluation:
    """An evaluation loop over ``EVALUATED_BATCHES`` batches, as the tracer runs it."""

    def __init__(self, run: Run, loss: Loss | None) -> None:
        self.optimizer = run.optimizer
        self._run = run
        self._loss = loss
        self._outputs: Any = None
        self._left = EVALUATED_BATCHES

    def step(self, batch: Any) -> None:  # noqa: ANN401 - any nesting of tensors
        """Evaluate one batch while the outputs of the previous one are still alive."""
        run = self._run
        policy = find_precision(run.recipe.precision)
        moved = cast_batch(batch, policy, run.device)
        run.model.eval()
        with torch.no_grad():
            with run.autocast():
                outputs = evaluate_batch(run.model, moved, self._loss)
            if policy.autocast is not None:  # as accelerate's ConvertOutputsToFp32
                outputs = map_tensors(outputs, _in_fp32)
            self._outputs = outputs
        self._left -= 1
        if not self._left:
            self._outputs = None


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    is_half = tensor.dtype in {torch.float16, torch.bfloat16}
    return tensor.float() if is_half else tensor


def evaluation_trace(traces: TraceSession, precision: str) -> StepTrace:
    """Return the trace of an evaluation loop under a precision, for any batch size.

    Raises:
        NotAffineError: If sizes are not affine in the batch size.
        Exception: What the model raises in evaluation mode.
    """
    workload = traces.workload
    loss = FakedLoss(workload.loss, workload.model)

    def program(model: nn.Module, on_phase: Callable[[str], None]) -> _Evaluation:
        recipe = Recipe(batch_size=2, precision=precision, optimizer="sgd")
        run = Run(model, recipe, on_phase=on_phase)
        return _Evaluation(run, loss.loss)

    def tracer(batch_size: int, short: Shortening | None) -> RawTrace:
        with silence_fake_tensor_log():
            return trace_step(
                workload.model,
                program,
                workload.batch,
                batch_size=batch_size,
                dims=workload.batch_dims,
                blocks=workload.blocks if short is None else short.short_blocks,
                target=workload.target,
                micro_steps=EVALUATED_BATCHES,
                short=short,
                copy_modules=loss.fake,
                real_values=traces.real_values,
                redirect_cuda=traces.redirect_cuda,
            )

    return traces.evaluation(precision, tracer)


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
