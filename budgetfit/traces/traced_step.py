"""A recipe's step on fake tensors: the program that trains, run for its trace."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from budgetfit.applying.run.run import Run
from budgetfit.traces.errors import quiet_fakes
from budgetfit.traces.loss_modules import FakedLoss
from budgetfit.tracing.isolation.scalar_randomness import (
    LARGEST_CHANCE,
    SMALLEST_CHANCE,
    SMALLEST_NOTE,
    chance,
)
from budgetfit.tracing.recording.second_micro_batch import repeat_micro_step
from budgetfit.tracing.recording.steady_state import repeat_step
from budgetfit.tracing.recording.step_tracer import trace_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from budgetfit.core.recipe import Recipe
    from budgetfit.tracing.cuda.target import CudaTarget
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.workload.model_and_batch import RealProgram
    from budgetfit.workload.workload import Subject

MICRO_STEPS = 2  # a third micro-batch does what the second did
NO_LOSS = (
    "there is no loss: planned with the mean of the float outputs; pass loss=, or "
    "labels in the batch, to plan for the real one and to train"
)


def traced_step(  # noqa: PLR0913 - one value each, all needed
    trained: Subject | RealProgram,
    recipe: Recipe,
    *,
    blocks: Sequence[str],
    target: CudaTarget | None,
    own_checkpointing: bool = False,
    short: Shortening | None = None,
    real_values: bool = False,
    one_device: bool = False,
) -> RawTrace:
    """Return a recipe's first step and the steady one that follows it.

    Args:
        trained: The model, and what it is trained on and with.
        recipe: Also of the batch size; ``short``'s own segments where there is one.
        blocks: Module paths of the chain, in the model that is traced.
        target: Whose semantics to take; None for a CPU's.
        own_checkpointing: Whether the model's own checkpointing stays on.
        short: How to shorten the model to a twin.
        real_values: As in ``trace_once``.
        one_device: As in ``trace_once``.

    Raises:
        Exception: What the model raises on fake tensors.
    """
    loss = FakedLoss(trained.loss, trained.model)
    assumed: list[str] = []

    def program(
        model: nn.Module, on_phase: Callable[[str], None], micro_steps: int
    ) -> Run:
        return Run(
            model,
            replace(recipe, gradient_accumulation_steps=micro_steps),
            loss=loss.loss,
            optimizer=trained.optimizer,
            on_phase=on_phase,
            keep_own_checkpointing=own_checkpointing,
            dims=trained.batch_dims,
            no_loss=lambda: assumed.append(NO_LOSS),
            fakes_for="cpu" if target is None else "cuda",
        )

    def trace(micro_steps: int = 1) -> RawTrace:
        with quiet_fakes():
            return trace_once(
                trained.model,
                partial(program, micro_steps=micro_steps),
                trained.batch,
                batch_size=recipe.batch_size,
                dims=trained.batch_dims,
                blocks=blocks,
                target=target,
                micro_steps=micro_steps,
                short=short,
                beside=loss.fake,
                real_values=real_values,
                one_device=one_device,
            )

    raw = _with_most_blocks(trace, len(blocks))
    if recipe.gradient_accumulation_steps > 1:
        if raw.gradients is not None and raw.gradients.complete:
            repeat_micro_step(raw, raw.gradients)
        else:
            raw = _with_most_blocks(partial(trace, MICRO_STEPS), len(blocks))
    repeat_step(raw)
    raw.notes.extend(dict.fromkeys(assumed))
    return raw


def _with_most_blocks(trace: Callable[[], RawTrace], count: int) -> RawTrace:
    """Trace a model that draws which of its ``count`` blocks run so that most do."""
    with chance(LARGEST_CHANCE) as largest:
        raw = trace()
    ran = len(set(raw.blocks))
    if not largest.drawn or ran == count:
        return raw
    try:
        with chance(SMALLEST_CHANCE):
            other = trace()
    except Exception:  # noqa: BLE001 - it ran with the usual numbers
        return raw
    if len(set(other.blocks)) <= ran:
        return raw
    other.notes.append(SMALLEST_NOTE)
    return other
