"""The loss of diffusion models: the prediction against noise, velocity or flow."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.nn import functional

from budgetfit.errors import InputError

TARGET: Final = "target"  # what a batch calls it; no forward takes an argument so named


def prediction_loss(outputs: Any, batch: Any) -> torch.Tensor:
    """Return the mean squared error of a prediction against ``batch["target"]``.

    In fp32, as diffusers' training scripts compute it. Class ids as a target mean cross
    entropy (masked image models). Of a model that predicts a variance beside the noise,
    the noise is taken: the first channels. The first entry of ``outputs`` is the
    prediction, shaped as the target: a tensor, or one for each sample.

    Raises:
        InputError: The batch has no target.
    """
    if not isinstance(batch, Mapping) or TARGET not in batch:
        raise InputError(
            'The loss of a diffusion model needs batch["target"]: the noise, velocity '
            "or flow that the model is to predict. Put it in the batch, or hand in "
            "loss=, a function of outputs and batch."
        )
    target = batch[TARGET]
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    prediction = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    if isinstance(prediction, (tuple, list)):
        prediction = torch.stack(tuple(prediction))
    if not target.is_floating_point():
        classes = prediction.float().flatten(2)
        return functional.cross_entropy(classes, target.flatten(1))
    for dim, size in enumerate(target.shape):
        if prediction.shape[dim] > size:
            prediction = prediction.narrow(dim, 0, size)
    return functional.mse_loss(prediction.float(), target.float())
