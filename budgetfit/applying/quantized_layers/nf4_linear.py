"""bitsandbytes' 4-bit linear layer, rebuilt so that it runs on fake tensors.

Stored as the library stores it, and with the same allocations in the same order as its
CUDA code. Values are never computed: a stand-in is traced, not trained with.

Source: bitsandbytes 0.50: ``functional.quantize_4bit``, ``autograd/_functions.py``
(``MatMul4Bit``) and ``backends/cuda/ops.py`` (``gemm_4bit``). Up to 1536 tokens its
kernels may multiply without unpacking; the unpacking counted here is then what the
forward saves. The backward always unpacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SCALE_BLOCK = 256  # scales that share a scale of their own
CODES = 16  # values of 4 bits
SCALE_CODES = 256
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)  # no slots: equal ones must be seen to be equal
class Packing:
    """How a 4-bit weight is stored.

    Attributes:
        nested: Whether its scales are quantised as well.
        block: Weights that share a scale.
        storage: dtype of the packed tensor.
        weight: dtype that the weight had, and that a backward unpacks it to.
        compute: dtype that inputs are converted to; None for their own.
    """

    nested: bool = True
    block: int = 64
    storage: torch.dtype = torch.uint8
    weight: torch.dtype = torch.bfloat16
    compute: torch.dtype | None = torch.bfloat16


class PackedLinear(nn.Module):
    """Stands for ``bitsandbytes.nn.Linear4bit``.

    Its statistics are buffers of bytes, so that no dtype policy converts them: none
    converts the library's, which are no buffers.
    """

    absmax: torch.Tensor
    offset: torch.Tensor

    def __init__(
        self, inputs: int, outputs: int, packing: Packing, bias: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        self.packing = packing
        for name, tensor in packed_tensors(inputs * outputs, packing).items():
            if name == "weight":
                self.weight = nn.Parameter(tensor, requires_grad=False)
            else:
                as_bytes = (tensor.numel() * tensor.element_size(),)
                self.register_buffer(
                    name, torch.empty(as_bytes, dtype=torch.uint8, device="meta")
                )
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convert, multiply, convert back (``Linear4bit.forward``)."""
        given = x.dtype
        if self.packing.compute is not None:
            x = x.to(self.packing.compute)
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        needs_graph = x.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and needs_graph:
            out: torch.Tensor = _Product.apply(x, bias, self)
        else:
            out = self.product(x, bias)
        return out.to(given)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Unpack the weight to the input's dtype and multiply (``gemm_4bit``)."""
        if self.packing.nested:
            scales = torch.empty_like(self.absmax, dtype=torch.float32)
            # Two tensors are alive until the product is made: not in place.
            _absmax = scales + self.offset.view(torch.float32)
        unpacked = torch.empty(
            (self.out_features, self.in_features), dtype=x.dtype, device=x.device
        )
        return nn.functional.linear(x, unpacked, bias)

    def unpacked(self) -> torch.Tensor:
        """Return the weight in the dtype that it had (``dequantize_4bit``)."""
        if self.packing.nested:
            scales = torch.empty_like(self.absmax, dtype=torch.float32)
            scales += self.offset.view(torch.float32)
        return torch.empty(
            (self.out_features, self.in_features),
            dtype=self.packing.weight,
            device=self.weight.device,
        )


def packed_tensors(count: int, packing: Packing) -> dict[str, torch.Tensor]:
    """Return what is stored of a weight of ``count`` numbers, on meta.

    With double quantisation the fp32 scales become bytes, with a mean (``offset``), and
    scales and a table of their own.
    """

    def tensor(size: int, dtype: torch.dtype, *more: int) -> torch.Tensor:
        return torch.empty((size, *more), dtype=dtype, device="meta")

    scales = -(-count // packing.block)
    packed = (count + 1) // (2 * packing.storage.itemsize)
    found = {"weight": tensor(packed, packing.storage, 1)}
    if not packing.nested:
        found["absmax"] = tensor(scales, torch.float32)
    else:
        found["absmax"] = tensor(scales, torch.uint8)
        found["nested_absmax"] = tensor(-(-scales // SCALE_BLOCK), torch.float32)
        found["nested_code"] = tensor(SCALE_CODES, torch.float32)
        found["offset"] = tensor(1, torch.float32)
    found["code"] = tensor(CODES, torch.float32)
    return found


def parameter_count(model: nn.Module) -> int:
    """Return how many numbers a model has; packed weights count unpacked.

    It is the same for a model with the library's layers and for one with stand-ins.
    """
    unpacked: dict[int, int] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")  # noqa: SLF001 - some compute theirs
        if isinstance(module, PackedLinear) or type(weight).__name__ == "Params4bit":
            layer: Any = module
            unpacked[id(weight)] = layer.in_features * layer.out_features
    return sum(unpacked.get(id(p), p.numel()) for p in model.parameters())


class _Product(torch.autograd.Function):
    """``MatMul4Bit``: keeps no input, as the packed weight has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives it attributes
        x: torch.Tensor,
        bias: torch.Tensor | None,
        layer: PackedLinear,
    ) -> torch.Tensor:
        out = layer.product(x, bias)
        ctx.layer = layer
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ANN401 - as torch has it
        (gradient,) = gradients
        needs_x, needs_bias, _ = ctx.needs_input_grad
        for_x = for_bias = None
        if needs_bias:
            for_bias = gradient.sum(0, dtype=ctx.bias_dtype)
        if needs_x:
            for_x = torch.matmul(gradient, ctx.layer.unpacked().to(gradient.dtype))
        return for_x, for_bias, None
