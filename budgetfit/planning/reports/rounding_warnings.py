"""A warning about weights that are trained in bf16, without a copy in fp32."""

import torch
from torch import nn

from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe


def rounding_warnings(model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """Return the warning, if it holds.

    bf16 has 8 significant bits: the next number is 2^-8 to 2^-7 of a weight away, and
    half of that is rounded off.
    """
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
