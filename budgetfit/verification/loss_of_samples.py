"""Compare the loss of two samples with the mean of each one's.

Micro-batches that are accumulated give the gradient of the mean of their losses: that
of the whole batch only where its loss is a mean over the samples.
"""

import math
from dataclasses import replace
from typing import Final

import torch

from budgetfit.applying.loss.call_model import compute_loss
from budgetfit.applying.precision import cast_batch, computes_in
from budgetfit.applying.run.run import Run
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.workload.training_setup import TrainingSetup

_SAMPLES: Final = 2
# Relative: one sample's products may run in other kernels, and 16 bits round.
_ROUNDING: Final = {torch.float32: 1e-3}
_ROUNDING_OF_16_BITS: Final = 0.02


def note_if_no_mean(setup: TrainingSetup, recipe: Recipe) -> str | None:
    """Return a note where a recipe accumulates a loss that is no mean over samples.

    The model runs in evaluation mode: without dropout, and with the running statistics
    of its batch norms. None where it has no loss then, or too little memory.
    """
    steps = recipe.gradient_accumulation_steps
    if steps == 1:
        return None
    plain = replace(recipe, segments=(), loss_chunks=1, compile="none")
    precision = find_precision(recipe.precision)
    both = setup.resized_batch(_SAMPLES)
    try:
        with (
            Run(
                setup.model,
                replace(plain, batch_size=1),
                loss=setup.loss,
                optimizer=setup.optimizer,
                device=setup.device,
                dims=setup.batch_dims,
            ) as run,
            torch.no_grad(),
            run.autocast(),
        ):
            run.model.eval()  # the run restores the modes that it found
            whole, *own = (
                compute_loss(
                    run.model, cast_batch(batch, precision, run.device), setup.loss
                ).item()
                for batch in (both, *run.parts(both))
            )
    except (InputError, RuntimeError):
        return None
    mean = sum(own) / len(own)
    allowed = _ROUNDING.get(computes_in(precision), _ROUNDING_OF_16_BITS)
    if math.isclose(whole, mean, rel_tol=allowed) or not math.isfinite(whole):
        return None
    size = recipe.batch_size * steps
    return (
        f"The loss of {_SAMPLES} samples is {whole:.4g}, and the mean of each one's "
        f"{mean:.4g}: {steps} micro-batches of {recipe.batch_size} do not give the "
        f"gradient of one batch of {size}. Use batch_size={size} for a loss over the "
        "batch (contrastive, Dice, covariances), and run.step(batch, weight=) or "
        "num_items_in_batch= for a sum, or a mean over tokens or weights of classes."
    )
