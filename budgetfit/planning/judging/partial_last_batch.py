"""The partial last batch of an epoch: its effect on reserved memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.core.budget import Budget
    from budgetfit.core.recipe import Recipe
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.gpus.table import Gpu


def last_batch_warnings(
    trace: StepTrace | None, recipe: Recipe, gpu: Gpu, budget: Budget
) -> tuple[str, ...]:
    """Warn where a partial last batch makes a plan that fits too large.

    Its smaller tensors split cached blocks, so that the allocator may reserve more in
    the next full step (fragmentation). Replayed with the smallest last batch, one
    sample.

    Args:
        trace: Valid at several batch sizes; None where there is no such trace: a
            warning is not worth tracing again.
        recipe: The plan's.
        gpu: The card.
        budget: What the allocator may reserve of it.
    """
    if trace is None or recipe.batch_size == 1:
        return ()
    reserved_bytes = replay(
        trace,
        recipe.batch_size,
        gpu,
        limit_bytes=UNLIMITED_BYTES,
        then_batch_sizes=(1, recipe.batch_size),
        micro_steps=recipe.gradient_accumulation_steps,
    ).reserved_bytes
    if reserved_bytes <= budget.usable_bytes:
        return ()
    text = (
        f"after a smaller last batch {format_bytes(reserved_bytes)} would be reserved, "
        f"more than the {format_bytes(budget.usable_bytes)} that are plannable: the "
        "allocator then empties its cache and goes on, slower. Pass drop_last=True to "
        "the DataLoader"
    )
    return (text,)
