"""Compare a loss in parts with the model's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from budgetfit.applying.loss.chunked_loss import rounding_of_parts
from budgetfit.applying.loss.deferred_logits import KEEP_WHOLE
from budgetfit.core.recipe import Recipe
from budgetfit.measuring.compare_gradients import (
    NOISE_FACTOR,
    GradientCheck,
    gradient_difference,
)
from budgetfit.measuring.protocols import MakeRun
from budgetfit.workload.training_setup import TrainingSetup

# Relative, of gradients in fp32: parts of a loss are smaller products, which other
# kernels may run.
_OTHER_KERNELS: Final = 1e-3
_NOT_COMPARED: Final = (
    "The loss in parts was not compared with the model's own, which ran out of memory: "
    "only with itself, without recomputation. Verify with shorter samples."
)


def with_loss_compared(  # noqa: PLR0913 - as ``check_gradients``, and where to note
    found: GradientCheck,
    setup: TrainingSetup,
    make: Callable[[Recipe], MakeRun],
    plain: Recipe,
    batch: object,
    *,
    dtype: torch.dtype,
    notes: list[str],
) -> GradientCheck:
    """Return the check of a plan whose loss is in parts, and compared with the whole.

    ``found``: the check against ``plain``, the recipe without recomputation, its loss
    in parts. ``make``: of runs that modify the model, or copies of it. ``dtype``: that
    the output head computes in. ``notes`` receives that there was too little
    memory.
    """
    try:
        error, parameter = gradient_difference(
            setup.model,
            make(plain),
            make(replace(plain, loss_chunks=1)),
            batch,
            loss=setup.loss,
            left_out=found.left_out,
        )
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        notes.append(_NOT_COMPARED)
        return found
    allowed = max(_OTHER_KERNELS, rounding_of_parts(dtype), NOISE_FACTOR * found.noise)
    if error <= allowed:
        return found
    refusal = (
        f"With the loss in parts the gradient of {parameter!r} differs by {error:.2g} "
        f"of its norm from that of the model's own loss. {KEEP_WHOLE}"
    )
    return replace(found, max_error=error, parameter=parameter, refusal=refusal)
