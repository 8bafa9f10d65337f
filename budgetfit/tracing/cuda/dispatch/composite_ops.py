"""Composite ops with a branch for CUDA in torch's C++: dropout, linear, norms, SDPA.

So have ``one_hot`` and some gradients for plain tensors (``product_gradients``,
``loss_gradients``).
For fake CPU tensors they are overridden with the branch that CUDA takes; real tensors
run as usual.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from budgetfit.tracing.cuda.dispatch.dispatch_modes import in_selective_checkpoint
from budgetfit.tracing.cuda.dispatch.fused_rms_norm import fused_rms_norm, is_fused
from budgetfit.tracing.cuda.dispatch.loss_gradients import LOSSES
from budgetfit.tracing.cuda.dispatch.product_gradients import PRODUCTS
from budgetfit.tracing.cuda.dispatch.recurrent_layers import (
    CUDNN_NOTE,
    RECURRENT_OPS,
    pad_packed_sequence,
)
from budgetfit.tracing.cuda.dispatch.sdpa_backend import AttentionCall, run_attention
from budgetfit.tracing.cuda.dispatch.thread_kernels import kernels_in_this_thread
from budgetfit.tracing.cuda.target import CudaTarget

aten = torch.ops.aten


def _composite(op: Any, *args: object, **kwargs: object) -> Any:
    """Run torch's C++ composite; ``decompose`` would run a Python decomposition."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Run CUDA's fused dropout, which saves a bool mask (Dropout.cpp)."""
    if train and 0 < p < 1 and x.numel() > 0:
        return aten.native_dropout(x, p, train)[0]
    return _composite(aten.dropout.default, x, p, train)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the bias in place; the composite does not for subclasses (Linear.cpp)."""
    if bias is not None and x.dim() != 2 and not x.is_contiguous():  # noqa: PLR2004
        product = x @ weight.t()
        return product + bias if in_selective_checkpoint() else product.add_(bias)
    return _composite(aten.linear.default, x, weight, bias)


def _rms_norm(
    x: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Run CUDA's fused op (layer_norm.cpp)."""
    if is_fused(x, weight):
        return fused_rms_norm(x, shape, weight, eps)[0]
    return _composite(aten.rms_norm.default, x, shape, weight, eps)


def _group_norm(  # noqa: PLR0913, PLR0917 - aten's signature
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """Copy channels-last inputs, which a CPU takes as they are (group_norm.cpp)."""
    rest = groups, weight, bias, eps, cudnn_enabled
    return _composite(aten.group_norm.default, x.contiguous(), *rest)


def _convolution_double_backward(  # noqa: PLR0913, PLR0917 - aten's signature
    gg_input: torch.Tensor,
    gg_weight: torch.Tensor | None,
    gg_bias: torch.Tensor | None,
    grad: torch.Tensor,
    weight: torch.Tensor,
    x: torch.Tensor,
    *args: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Copy the gradient, turned, for that of the weight (Convolution.cpp)."""
    stride, padding, dilation, transposed, output_padding, groups, _ = args
    if groups > 1 or gg_weight is not None or gg_bias is not None or not x.numel():
        op = aten._convolution_double_backward.default
        rest = grad, weight, x, *args
        return tuple(_composite(op, gg_input, gg_weight, gg_bias, *rest))
    out = aten.convolution(gg_input, weight, None, *args[:-1])
    pair = gg_input.transpose(0, 1), grad.transpose(0, 1).contiguous()
    if transposed:
        pair = pair[1], pair[0]
    turned = dilation, padding, stride, False, output_padding, groups
    of_weight = aten.convolution(*pair, None, *turned).transpose(0, 1)
    for dim, size in enumerate(weight.shape):
        of_weight = of_weight.narrow(dim, 0, size)
    return out, None, of_weight


def _one_hot(indices: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Write ones into zeros; subclasses are compared with all classes (Onehot.cpp)."""
    if not indices.numel():
        return _composite(aten.one_hot.default, indices, num_classes)
    if num_classes < 0:
        num_classes = int(indices.max().item()) + 1
    zeros = indices.new_zeros((*indices.shape, num_classes))
    return zeros.scatter_(-1, indices.unsqueeze(-1), 1)


def _half_to_float(
    fused: Callable[..., object], composite: object
) -> Callable[..., object]:
    """Return softmax of fp16 into fp32 without a cast, as on CUDA (SoftMax.cpp)."""

    def kernel(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> object:
        if x.dtype == torch.float16 and dtype == torch.float32:
            return fused(x, dim, True)
        return _composite(composite, x, dim, dtype)

    return kernel


def _attention(target: CudaTarget) -> Callable[..., object]:
    def kernel(  # noqa: PLR0913, PLR0917 - aten's signature
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
        )
        return run_attention(call, target, scale)

    return kernel


def _only_fakes(
    kernel: Callable[..., object], composite: object
) -> Callable[..., object]:
    def guarded(first: torch.Tensor, *args: object, **kwargs: object) -> object:
        # AOTAutograd's functional tensors, of compiled blocks, wrap fakes.
        if isinstance(first, (FakeTensor, FunctionalTensor)):
            return kernel(first, *args, **kwargs)
        return _composite(composite, first, *args, **kwargs)

    return guarded


def _of_plain_tensors(kernel: Callable[..., object]) -> Callable[..., object]:
    """Return a kernel with gradients for what is a plain tensor in training."""
    # Those of ``torch.func`` and of AOTAutograd are subclasses there, too.

    def guarded(first: torch.Tensor, *args: object, **kwargs: object) -> object:
        if isinstance(first, FakeTensor):
            return kernel(first, *args, **kwargs)
        return NotImplemented

    return guarded


def _noted(
    kernel: Callable[..., object], note: str, notes: set[str]
) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> Any:
        notes.add(note)
        return kernel(*args, **kwargs)

    return run


@contextlib.contextmanager
def cuda_composite_ops(
    target: CudaTarget, notes: set[str] | None = None
) -> Iterator[None]:
    """Run CUDA's branches for fake CPU tensors; ``notes`` gets what is left out."""
    kernels: dict[str, tuple[Callable[..., Any], Any]] = {
        "dropout": (_dropout, aten.dropout.default),
        "linear": (_linear, aten.linear.default),
        "group_norm": (_group_norm, aten.group_norm.default),
        "rms_norm": (_rms_norm, aten.rms_norm.default),
        "_fused_rms_norm": (fused_rms_norm, aten._fused_rms_norm.default),
        "_convolution_double_backward": (
            _convolution_double_backward,
            aten._convolution_double_backward.default,
        ),
        "softmax.int": (
            _half_to_float(aten._softmax, aten.softmax.int),
            aten.softmax.int,
        ),
        "log_softmax.int": (
            _half_to_float(aten._log_softmax, aten.log_softmax.int),
            aten.log_softmax.int,
        ),
        "scaled_dot_product_attention": (
            _attention(target),
            aten.scaled_dot_product_attention.default,
        ),
        "_pad_packed_sequence": (
            pad_packed_sequence,
            aten._pad_packed_sequence.default,
        ),
    }
    for name, kernel in RECURRENT_OPS.items():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        if target.cudnn and overload and notes is not None:  # a layer, no single cell
            kernel = _noted(kernel, CUDNN_NOTE, notes)  # noqa: PLW2901
        kernels[name] = kernel, op
    guarded = {name: _only_fakes(*each) for name, each in kernels.items()}
    plain: dict[str, Callable[..., Any]] = {**PRODUCTS, **LOSSES, "one_hot": _one_hot}
    for name, kernel in plain.items():
        guarded[name] = _of_plain_tensors(kernel)
    with kernels_in_this_thread("AutogradCPU", guarded):
        yield
