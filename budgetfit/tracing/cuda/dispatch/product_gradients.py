"""Gradients of products, which autograd computes otherwise for tensor subclasses.

For plain tensors it looks for zeros and divides by the input if there are none, as
here. For subclasses, as fake tensors are, it takes a path without division that needs
far more memory.

Source: ``prod_backward`` and ``cumprod_backward`` in
``torch/csrc/autograd/FunctionsManual.cpp``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class _Cumprod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out = aten.cumprod(x, dim, dtype=dtype)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, out = ctx.saved_tensors
        grad = grad.to(x.dtype)
        if x.numel() <= 1 or x.shape[ctx.dim] == 1:
            return grad, None, None
        product = out * grad
        zeros = x == 0
        aten.any(zeros)
        turned = product.flip(ctx.dim)
        summed = turned.cumsum(ctx.dim)
        total = summed.flip(ctx.dim)
        del turned, summed
        return total.div(x), None, None


class _Prod(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            if dim is None:
                out = aten.prod(x, dtype=dtype)
            else:
                out = aten.prod(x, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x, out)
        ctx.dim, ctx.keepdim = dim, keepdim
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, out = ctx.saved_tensors
        x = x.to(grad.dtype)
        if ctx.dim is None:
            _count_zeros(x, None)
            return grad * (out / x), None, None, None
        if not x.dim():
            return grad, None, None, None
        if not ctx.keepdim:
            grad, out = grad.unsqueeze(ctx.dim), out.unsqueeze(ctx.dim)
        kept = _count_zeros(x, ctx.dim)
        result = grad * (out / x)
        del kept
        return result, None, None, None


def _count_zeros(x: Tensor, dim: int | None) -> tuple[Tensor, ...]:
    """Look for zeros; return what of that lives until the gradient is computed."""
    if dim is None:  # by their positions, of which there are none
        if x.dim():
            aten.eq.Scalar(x, 0)
        return ()
    zeros = x == 0
    counts = zeros.sum(dim, keepdim=True)
    counts.sum()
    return zeros, counts


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Run ``cumprod`` with CUDA's gradient."""
    return _Cumprod.apply(x, dim, dtype)


def prod(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Run ``prod`` of all elements with CUDA's gradient."""
    return _Prod.apply(x, None, False, dtype)


def prod_of_dim(
    x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Run ``prod`` over one dimension with CUDA's gradient."""
    return _Prod.apply(x, dim, keepdim, dtype)


PRODUCTS: dict[str, Callable[..., Any]] = {
    "cumprod": cumprod,
    "prod": prod,
    "prod.dim_int": prod_of_dim,
}
