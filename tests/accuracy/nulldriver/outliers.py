"""LLM.int8() without outliers: the null driver has no values, so it finds none."""

import contextlib
import math
import os
from collections.abc import Iterator
from unittest import mock

import torch

from budgetfit.applying.quantized_layers import int8_linear
from budgetfit.applying.quantized_layers.int8_linear import Int8Linear


@contextlib.contextmanager
def no_outliers() -> Iterator[None]:
    """Predict int8 layers whose inputs have no outliers, instead of the usual few."""
    with (
        mock.patch.object(int8_linear, "_quantised", _quantised),
        mock.patch.object(int8_linear, "_scaled_product", _scaled_product),
        mock.patch.dict(os.environ, BUDGETFIT_CACHE="off"),
    ):
        yield


def _quantised(x: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.empty(math.prod(x.shape[:-1]), dtype=torch.float32, device=x.device)
    quantised = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    is_outlier = x.abs() >= threshold
    is_outlier.any()
    _columns = torch.empty(0, dtype=torch.int64, device=x.device)
    quantised[:, :0] = 0
    return quantised, scales


def _scaled_product(
    x: torch.Tensor,
    quantised: torch.Tensor,
    layer: Int8Linear,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    outliers = torch.empty(0, dtype=x.dtype, device=x.device)
    return int8_linear._product(quantised, layer, bias, x.dtype), outliers
