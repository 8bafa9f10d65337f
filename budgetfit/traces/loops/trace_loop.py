"""Trace two optimizer steps of a training loop, or as many as its optimizer takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from budgetfit.core.loop import Loop
from budgetfit.core.recipe import Recipe
from budgetfit.traces.loops.collators import collator
from budgetfit.traces.loops.library import make_loop
from budgetfit.traces.loops.library_state import (
    library_state_preserved,
    modules_restored,
)
from budgetfit.traces.loops.prepare import prepare
from budgetfit.traces.loss_modules import FakedLoss
from budgetfit.tracing.fake.model_copy import silence_fake_tensor_log
from budgetfit.tracing.recording.raw_trace import LoopRunner, RawTrace
from budgetfit.tracing.recording.step_tracer import TraceOptions, trace_step
from budgetfit.workload.training_setup import TrainingSetup
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    from torch import nn


STEPS = 2  # what the first leaves alive the second frees
MOST_MICRO_STEPS = 3  # those after the second do what the third does


def trace_loop(  # noqa: PLR0913 - trace_recipe's, and how many steps
    trained: Workload | TrainingSetup,
    recipe: Recipe,
    loop: Loop,
    *,
    own_checkpointing: bool = False,
    on_missing_loss: Callable[[], object],
    steps: int = STEPS,
    **options: Unpack[TraceOptions],
) -> RawTrace:
    """Run a loop for ``steps`` optimizer steps and record them.

    Arguments as ``trace_recipe``.

    Raises:
        Exception: What the model or the library raises on fake tensors.
    """
    loss = FakedLoss(trained.loss, trained.model)
    micro_steps = min(recipe.gradient_accumulation_steps, MOST_MICRO_STEPS)

    def program(model: nn.Module, on_phase: object) -> LoopRunner:  # noqa: ARG001
        prepared = prepare(
            model,
            replace(recipe, gradient_accumulation_steps=micro_steps),
            loop,
            loss=loss.loss,
            optimizer=trained.optimizer,
            own_checkpointing=own_checkpointing,
            on_missing_loss=on_missing_loss,
        )
        prepared.untraced_batches = recipe.gradient_accumulation_steps - micro_steps
        return make_loop(prepared)

    uses_library = loop.kind != "plain"
    with (
        silence_fake_tensor_log(),
        library_state_preserved() if uses_library else contextlib.nullcontext(),
        modules_restored() if loop.use_liger_kernel else contextlib.nullcontext(),
    ):
        return trace_step(
            trained.model,
            program,
            trained.batch,
            batch_size=recipe.batch_size,
            dims=trained.batch_dims,
            micro_steps=micro_steps,
            steps=steps,
            copy_modules=loss.fake,
            collate=collator(loop),
            also_runs=(trained.loss, trained.optimizer),
            **options,
        )
