"""The largest batch that can be evaluated between training steps.

Evaluation holds no graph, so its batch may be several times the training's; but its
logits are there in full, labels make a loss of them, accelerate returns them in fp32
where it trains in mixed precision, and an ordinary loop, ``outputs = model(**batch)``,
holds those of the batch before until the next ones are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from budgetfit.applying.loss.call_model import evaluated
from budgetfit.applying.precision import cast_batch
from budgetfit.applying.pytree import map_tensors
from budgetfit.applying.run.run import Run
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.memory.replay import AfterTraining
from budgetfit.planning.search.largest_batch import largest_up_to
from budgetfit.traces.errors import quiet_fakes
from budgetfit.traces.loss_modules import FakedLoss
from budgetfit.tracing.recording.evaluation import evaluation_after, inputs_of
from budgetfit.tracing.recording.step_tracer import trace_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from budgetfit.applying.loss.call_model import Loss
    from budgetfit.core.budget import Budget
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.traces.session import Traces
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.raw_trace import RawTrace

LARGEST = 1 << 20  # where memory does not grow with the batch
BATCHES = 2  # evaluated one after the other


def evaluation_batch_size(traces: Traces, recipe: Recipe, budget: Budget) -> int | None:
    """Return the largest batch whose evaluation fits while ``recipe`` trains.

    Evaluation means: the model in evaluation mode, no gradients kept, the recipe's
    autocast, labels, two batches one after the other; weights and optimizer states
    stay, gradients are None, and the update's micro-batches are held: transformers'
    Trainer moves all of them to the device at once and evaluates beside them. It fits
    when the replay of training steps and then of
    evaluations ends within the budget. The allocator may empty its cache once,
    when evaluation begins, but not at every batch.

    Returns:
        Samples; 0 where not even one fits, None where it cannot be told: the model does
        not run so, sizes are on no line, or the training itself does not fit.
    """
    try:
        evaluation = evaluation_trace(traces, recipe.precision)
    except Exception as error:  # noqa: BLE001 - any model's own, in evaluation mode
        text = " ".join(str(error).split())[:200]
        traces.log.append(f"evaluation is not traced: {type(error).__name__}: {text}")
        return None
    trained = traces.exact(recipe)
    held = inputs_of(trained, recipe.batch_size) * recipe.gradient_accumulation_steps
    trace = evaluation_after(trained, evaluation, held)
    training = AfterTraining(
        trace,
        recipe.batch_size,
        traces.subject.gpu,
        limit_bytes=budget.usable_bytes,
        micro_steps=recipe.gradient_accumulation_steps,
    )

    def fits(*then_batch_sizes: int) -> bool:
        retries = training.retries(then_batch_sizes)
        return retries is not None and retries <= 1

    if not fits():
        return None
    return largest_up_to(
        lambda samples: fits(samples, samples),
        _upper_bound(trace, recipe, budget.usable_bytes),
    )


class _Evaluation:
    """Evaluates batch after batch, in the order of an ordinary loop."""

    def __init__(self, run: Run, loss: Loss | None) -> None:
        self.optimizer = run.optimizer
        self._run = run
        self._loss = loss
        self._outputs: Any = None
        self._left = BATCHES

    def step(self, batch: Any) -> None:  # noqa: ANN401 - any nesting of tensors
        """Evaluate one batch; the outputs of the last one are there meanwhile."""
        run = self._run
        policy = find_precision(run.recipe.precision)
        moved = cast_batch(batch, policy, run.device)
        run.model.eval()
        with torch.no_grad():
            with run.autocast():
                outputs = evaluated(run.model, moved, self._loss)
            if policy.autocast is not None:  # as accelerate's ConvertOutputsToFp32
                outputs = map_tensors(outputs, _in_fp32)
            self._outputs = outputs
        self._left -= 1
        if not self._left:
            self._outputs = None


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    is_half = tensor.dtype in {torch.float16, torch.bfloat16}
    return tensor.float() if is_half else tensor


def evaluation_trace(traces: Traces, precision: str) -> StepTrace:
    """Return the trace of evaluations under a precision, for any batch size.

    Raises:
        NotAffineError: If sizes are on no line.
        Exception: What the model raises in evaluation mode.
    """
    subject = traces.subject
    loss = FakedLoss(subject.loss, subject.model)

    def program(model: nn.Module, on_phase: Callable[[str], None]) -> _Evaluation:
        recipe = Recipe(batch_size=2, precision=precision, optimizer="sgd")
        run = Run(model, recipe, on_phase=on_phase)
        return _Evaluation(run, loss.loss)

    def tracer(batch_size: int, short: Shortening | None) -> RawTrace:
        with quiet_fakes():
            return trace_once(
                subject.model,
                program,
                subject.batch,
                batch_size=batch_size,
                dims=subject.batch_dims,
                blocks=subject.blocks if short is None else short.twin_blocks,
                target=subject.target,
                micro_steps=BATCHES,
                short=short,
                beside=loss.fake,
                real_values=traces.real_values,
                one_device=traces.one_device,
            )

    return traces.evaluation(precision, tracer)


def _upper_bound(trace: StepTrace, recipe: Recipe, limit_bytes: int) -> int:
    """Return the batch at which live bytes alone would fill the device."""
    phase = trace.phases[-1]
    before, during = trace.events[: phase.start], trace.events[phase.start : phase.end]
    sizes = trace.fixed_bytes + trace.bytes_per_sample * recipe.batch_size
    kept = int(_signed(sizes, before).sum())
    fixed = np.cumsum(_signed(trace.fixed_bytes, during))
    slope = np.cumsum(_signed(trace.bytes_per_sample, during))
    grows = slope > 0
    if not grows.any():
        return LARGEST
    room = (limit_bytes - kept - fixed[grows]) // slope[grows]
    return int(min(LARGEST, max(0, room.min())))


def _signed(sizes: np.ndarray, events: np.ndarray) -> np.ndarray:
    """Return what each event adds to the live bytes."""
    return np.sign(events).astype(np.int64) * sizes[np.abs(events) - 1]
