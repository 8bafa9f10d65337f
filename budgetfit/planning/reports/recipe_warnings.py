"""Warn of what a recipe changes: one large batch into several, weights into bf16."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import TraceError

if TYPE_CHECKING:
    from budgetfit.traces.session import TraceSession


def accumulation_warnings(traces: TraceSession, recipe: Recipe) -> tuple[str, ...]:
    """Return what a recipe's micro-batches change besides the memory."""
    # A loss that compares the samples of a batch, and batch norms that train.
    steps, size, ranks = (
        recipe.gradient_accumulation_steps,
        recipe.batch_size,
        recipe.ranks,
    )
    if steps * ranks == 1:
        return ()
    found, whole = [], f"batch_size={size * steps}"
    own = f"micro-batch of {size}" + f" on each of {ranks} ranks" * (ranks > 1)
    accumulated = f"with gradient_accumulation_steps={steps} " * (steps > 1)
    compares = False
    with suppress(TraceError):  # of batch sizes that the plan does without
        compares = traces.compares_samples(recipe)
    if compares:
        more = (
            f"Use {whole} to compare all {size * steps}"
            if ranks == 1
            else "Gather what it compares over ranks in loss="
        )
        found.append(
            f"the loss compares the samples of a batch: {accumulated}each {own} "
            f"compares only its own. {more}"
        )
    model = traces.workload.model
    if any(
        isinstance(module, _BatchNorm)
        and not isinstance(module, SyncBatchNorm)
        and module.training == model.training  # else frozen on purpose
        for module in model.modules()
    ):
        more = "nn.SyncBatchNorm.convert_sync_batchnorm before apply"
        if ranks == 1:
            more = whole
        found.append(
            f"batch norms take the statistics of each {own}, not of all "
            f"{recipe.effective_batch_size} samples. Use {more} if that matters"
        )
    return tuple(found)


def rounding_warnings(model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """Return the warning, if it holds."""
    # bf16 has 8 significant bits: the next number is 2^-8 to 2^-7 of a weight away, and
    # half of that is rounded off.
    dtypes = {each.dtype for each in model.parameters() if each.requires_grad}
    weights = find_precision(recipe.precision).weights
    in_bf16 = torch.bfloat16 in dtypes if weights == "as-is" else weights == "bf16"
    if not in_bf16:
        return ()
    return (
        (
            "weights are trained in bf16: an update of less than 0.2 % of a weight is "
            "lost to rounding; bf16-mixed keeps them in fp32"
        ),
    )
