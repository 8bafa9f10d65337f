"""bitsandbytes' LLM.int8() linear layer for fake tensors.

Like ``nf4_linear``: the library's storage format and the same allocations in the same
order, without values.

Source: bitsandbytes 0.50: ``autograd/_functions.py`` (``MatMul8bitLt``) and
``backends/cuda/ops.py`` (``int8_*``). How many columns of an input hold outliers
depends on its values; a few are assumed, as in every large language model (LLM.int8(),
section 3: at most 7).
"""

import math
from typing import Any, Final

import torch
from torch import nn

OUTLIER_COLUMNS: Final = 7
INT8_ALIGNMENT = 4  # of the inner dimension of cuBLASLt's int8 GEMM


class Int8Linear(nn.Module):
    """Fake ``bitsandbytes.nn.Linear8bitLt`` with quantised weights.

    The row scales are a uint8 buffer, so that ``apply_precision`` does not cast them.
    """

    SCB: torch.Tensor

    def __init__(
        self, inputs: int, outputs: int, threshold: float, bias: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        self.threshold = threshold
        self.weight = nn.Parameter(
            torch.empty((outputs, inputs), dtype=torch.int8, device="meta"),
            requires_grad=False,
        )
        scales_bytes = (outputs * torch.float32.itemsize,)
        self.register_buffer(
            "SCB", torch.empty(scales_bytes, dtype=torch.uint8, device="meta")
        )
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantise the input, multiply in int8, scale the product."""
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return _MatMul8bitLt.apply(x, bias, self)

    @property
    def scales(self) -> torch.Tensor:
        """The fp32 absmax of each row of the weight."""
        return self.SCB.view(torch.float32)


class _MatMul8bitLt(torch.autograd.Function):
    """``MatMul8bitLt``.

    As in the library, its input is an attribute of the graph node and not a saved
    tensor, so that checkpointing a block does not free it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: Int8Linear
    ) -> torch.Tensor:
        shape = x.shape
        if x.dim() == 3:  # noqa: PLR2004 - samples, tokens, features
            x = x.reshape(-1, shape[-1])
        quantised, scales = _quantised(x.to(torch.float16), layer.threshold)
        out, outliers = _scaled_product(x, quantised, layer, bias)
        del quantised, scales  # alive until here: the product reads both
        ctx.layer, ctx.shape, ctx.input_dtype = layer, shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.kept = (outliers, x) if ctx.needs_input_grad[0] else None
        return out.reshape(*shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        needs_x, needs_bias, _ = ctx.needs_input_grad
        layer: Int8Linear = ctx.layer
        for_x = for_bias = None
        if needs_bias:
            for_bias = gradient.sum(0, dtype=ctx.bias_dtype)
        if gradient.dim() == 3:  # noqa: PLR2004
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        if needs_x:
            weight = layer.weight.to(ctx.input_dtype, copy=True)
            weight.mul_(layer.scales.unsqueeze(1).mul(1.0 / 127.0))
            for_x = torch.matmul(gradient.to(ctx.input_dtype), weight).view(ctx.shape)
        return for_x, for_bias, None


def _quantised(x: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows in int8 and their scales (``int8_vectorwise_quant``)."""
    rows = math.prod(x.shape[:-1])
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    quantised = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if threshold > 0:
        is_outlier = x.abs() >= threshold
        is_outlier.any()
        columns = is_outlier.any(dim=0)
        quantised[:, :OUTLIER_COLUMNS] = 0
        del columns
    return quantised, scales


def _scaled_product(
    x: torch.Tensor,
    quantised: torch.Tensor,
    layer: Int8Linear,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the product and the input's outliers (``int8_mixed_scaled_mm``)."""
    if layer.threshold <= 0:
        return _product(quantised, layer, bias, x.dtype), None
    outliers = x[:, :OUTLIER_COLUMNS].contiguous()
    columns = layer.weight[:, :OUTLIER_COLUMNS].contiguous()
    weights = (columns * layer.scales.view(-1, 1) * (1.0 / 127.0)).to(x.dtype).t()
    out = _product(quantised, layer, bias, x.dtype)
    # With outliers autocast casts this to its dtype; without them the output has the
    # dtype of the input, which may be the larger one.
    return out.addmm(outliers, weights).to(x.dtype), outliers


def _product(
    quantised: torch.Tensor,
    layer: Int8Linear,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply int8 to int32 and scale to ``dtype`` (``int8_scaled_mm``)."""
    rows = quantised.shape[0]
    whole = torch.empty(
        (rows, layer.out_features), dtype=torch.int32, device=quantised.device
    )
    if layer.in_features % INT8_ALIGNMENT:  # in fp32, as the library falls back to
        exact = torch.matmul(quantised.float(), layer.weight.float().t())
        whole.copy_(exact.to(torch.int32))
        del exact
    else:
        # Two int8 viewed as one fp16: half the products at half the throughput, so the
        # time is that of int8.
        torch.mm(
            quantised.view(torch.float16),
            layer.weight.view(torch.float16).t(),
            out=whole.view(torch.float16)[:, : layer.out_features],
        )
    half = torch.empty_like(whole, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        half.add_(bias)
    return half.to(dtype)
