"""bitsandbytes' 4-bit (NF4, FP4) linear layer for fake tensors.

The library's storage format, and the same allocations in the same order as its CUDA
code. Values are never computed: the layer is traced, not trained.

Source: bitsandbytes 0.50: ``functional.quantize_4bit``, ``autograd/_functions.py``
(``MatMul4Bit``) and ``backends/cuda/ops.py`` (``gemm_4bit``). Up to 1536 tokens its
kernels may multiply without dequantizing, and the forward takes less than it does here.
The backward always dequantizes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

NESTED_BLOCK_SIZE = 256  # absmax values per nested absmax (double quantization)
CODE_VALUES = 16  # of the 4-bit code table
NESTED_CODE_VALUES = 256


@dataclass(frozen=True, kw_only=True)  # no slots: compared by value
class Nf4Format:
    """Storage format of a 4-bit weight (bitsandbytes' ``QuantState``).

    Attributes:
        nested: Double quantization: whether the scales are quantised as well.
        block: Weights per scale (``blocksize``).
        storage: dtype of the packed tensor (``quant_storage``).
        weight: Original dtype of the weight, which backward dequantizes it to.
        compute: dtype that inputs are cast to (``compute_dtype``); None for their own.
    """

    nested: bool = True
    block: int = 64
    storage: torch.dtype = torch.uint8
    weight: torch.dtype = torch.bfloat16
    compute: torch.dtype | None = torch.bfloat16


class Nf4Linear(nn.Module):
    """Fake ``bitsandbytes.nn.Linear4bit``.

    The quantization state is in uint8 buffers, so that ``apply_precision`` does not
    cast it; the library's is in no buffers.
    """

    absmax: torch.Tensor
    code: torch.Tensor
    offset: torch.Tensor
    nested_absmax: torch.Tensor
    nested_code: torch.Tensor

    def __init__(
        self, inputs: int, outputs: int, packing: Nf4Format, bias: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        self.packing = packing
        for name, tensor in nf4_tensors(inputs * outputs, packing).items():
            if name == "weight":
                self.weight = nn.Parameter(tensor, requires_grad=False)
            else:
                as_bytes = (tensor.numel() * tensor.element_size(),)
                self.register_buffer(
                    name, torch.empty(as_bytes, dtype=torch.uint8, device="meta")
                )
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Cast the input, multiply, cast back (``Linear4bit.forward``)."""
        given = x.dtype
        if self.packing.compute is not None:
            x = x.to(self.packing.compute)
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        needs_graph = x.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and needs_graph:
            out: torch.Tensor = _MatMul4Bit.apply(x, bias, self)
        else:
            out = self.matmul(x, bias)
        return out.to(given)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Dequantize the weight to the input's dtype and multiply (``gemm_4bit``)."""
        if self.packing.nested:
            scales = torch.empty_like(self.absmax, dtype=torch.float32)
            # Two tensors are alive until the product is made: not in place.
            _absmax = scales + self.offset.view(torch.float32)
        unpacked = torch.empty(
            (self.out_features, self.in_features), dtype=x.dtype, device=x.device
        )
        return nn.functional.linear(x, unpacked, bias)

    def dequantize(self) -> torch.Tensor:
        """Return the weight in its original dtype (``dequantize_4bit``)."""
        if self.packing.nested:
            scales = torch.empty_like(self.absmax, dtype=torch.float32)
            scales += self.offset.view(torch.float32)
        return torch.empty(
            (self.out_features, self.in_features),
            dtype=self.packing.weight,
            device=self.weight.device,
        )


def nf4_tensors(count: int, packing: Nf4Format) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a 4-bit weight with ``count`` elements, on meta.

    With double quantization the fp32 scales are stored in 8 bits, with a mean
    (``offset``), nested scales and a code table.
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
        found["nested_absmax"] = tensor(-(-scales // NESTED_BLOCK_SIZE), torch.float32)
        found["nested_code"] = tensor(NESTED_CODE_VALUES, torch.float32)
        found["offset"] = tensor(1, torch.float32)
    found["code"] = tensor(CODE_VALUES, torch.float32)
    return found


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters; 4-bit weights count by their original shape."""
    unpacked: dict[int, int] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(module, Nf4Linear) or type(weight).__name__ == "Params4bit":
            layer: Any = module
            unpacked[id(weight)] = layer.in_features * layer.out_features
    return sum(unpacked.get(id(p), element_count(p)) for p in model.parameters())


def element_count(parameter: nn.Parameter) -> int:
    """Return how many elements a parameter has; under ZeRO-3 none are in it."""
    return getattr(parameter, "ds_numel", parameter.numel())


class _MatMul4Bit(torch.autograd.Function):
    """``MatMul4Bit``: saves no input, as the 4-bit weight has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: Nf4Linear
    ) -> torch.Tensor:
        out = layer.matmul(x, bias)
        ctx.layer = layer
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        needs_x, needs_bias, _ = ctx.needs_input_grad
        for_x = for_bias = None
        if needs_bias:
            for_bias = gradient.sum(0, dtype=ctx.bias_dtype)
        if needs_x:
            for_x = torch.matmul(gradient, ctx.layer.dequantize().to(gradient.dtype))
        return for_x, for_bias, None
