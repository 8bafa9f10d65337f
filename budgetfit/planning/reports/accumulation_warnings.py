"""Warn where gradient accumulation is not the same as one large batch."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from budgetfit.errors import TraceError

if TYPE_CHECKING:
    from budgetfit.core.recipe import Recipe
    from budgetfit.traces.session import TraceSession


def accumulation_warnings(traces: TraceSession, recipe: Recipe) -> tuple[str, ...]:
    """Return what a recipe's micro-batches change besides the memory.

    A loss that compares the samples of a batch, and batch norms that train.
    """
    steps, size = recipe.gradient_accumulation_steps, recipe.batch_size
    if steps == 1:
        return ()
    found, whole = [], f"batch_size={size * steps}"
    compares = False
    with suppress(TraceError):  # of batch sizes that the plan does without
        compares = traces.compares_samples(recipe)
    if compares:
        found.append(
            "the loss compares the samples of a batch: with "
            f"gradient_accumulation_steps={steps} each micro-batch of {size} compares "
            f"only its own. Use {whole} to compare all {size * steps}"
        )
    model = traces.workload.model
    if any(
        isinstance(module, _BatchNorm)
        and not isinstance(module, SyncBatchNorm)
        and module.training == model.training  # else frozen on purpose
        for module in model.modules()
    ):
        found.append(
            f"batch norms take the statistics of each micro-batch of {size}, not of "
            f"all {size * steps} samples. Use {whole} if that matters"
        )
    return tuple(found)
