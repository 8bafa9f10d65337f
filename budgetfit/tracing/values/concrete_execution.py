"""Concrete execution of all ops of a traced step, on the CPU at small batch sizes.

For models whose sizes or loops depend on the values of their own activations. All
samples are equal, noise included, so that each of them takes the same branches and
sizes stay affine in the batch size. See ``docs/decisions/0024-values-that-decide.md``.
"""

import torch
from torch import nn
from torch._ops import OpOverload

from budgetfit.tracing.call_cache import Args, Kwargs

MAX_WEIGHTS_BYTES = 2 << 30
MAX_BUFFER_ELEMENTS = 4096
REAL_VALUES = (
    "values decide in this model: it was computed with real numbers at batch 2 and 3, "
    "and sizes were scaled from there; a batch with other values may take more"
)
aten = torch.ops.aten
_SEED = 0
_ATTENTION = {
    # positions of the arguments attn_mask and is_causal
    aten._scaled_dot_product_flash_attention.default: (None, 4),
    aten._scaled_dot_product_efficient_attention.default: (3, 6),
    aten._scaled_dot_product_cudnn_attention.default: (3, 6),
}
_DROPOUT = aten.native_dropout.default


def weight_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight or buffer, typical ones for a meta tensor."""
    if tensor.device.type != "meta":
        return tensor.detach().cpu().clone()
    shape, dtype = tensor.shape, tensor.dtype
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    if tensor.dim() <= 1:  # norms and biases
        return torch.ones(shape, dtype=dtype)
    fan_in = max(tensor.numel() // max(tensor.shape[0], 1), 1)
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randn(shape, generator=generator) * fan_in**-0.5
    return drawn.to(dtype)


def is_small_integer_buffer(tensor: torch.Tensor) -> bool:
    """Return whether a buffer is a counter, flag or pointer that models may read."""
    return (
        not tensor.is_meta
        and not isinstance(tensor, torch.nn.Parameter)
        and not (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() <= MAX_BUFFER_ELEMENTS
    )


def weights_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights and buffers in host memory."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


def run_on_cpu(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run any op on concrete values; return None if the CPU has no kernel for it."""
    # Dropout is the identity, and noise is the same each time and for each sample.
    try:
        with torch._C._DisableAutocast(), torch.no_grad():
            if func in _ATTENTION:
                return _attention(func, args, kwargs)
            if func is _DROPOUT:
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
            if torch.Tag.nondeterministic_seeded in func.tags:
                return _noise(func, args, kwargs)
            return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
        return None


def _noise(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        out = func(*args, **kwargs)
    if isinstance(out, torch.Tensor) and out.dim() > 1:
        out.copy_(out[:1].clone().expand_as(out))
    return out


def _attention(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Return the attention output only, without a fused kernel's other outputs."""
    mask_at, causal_at = _ATTENTION[func]
    mask = args[mask_at] if mask_at is not None else None
    causal = len(args) > causal_at and args[causal_at]
    return aten._scaled_dot_product_attention_math.default(
        *args[:3], mask, 0.0, causal, None, scale=kwargs.get("scale")
    )[:1]
