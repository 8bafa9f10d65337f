"""SDPA backend choice as on CUDA: flash, memory-efficient, cuDNN or math attention.

``scaled_dot_product_attention`` chooses by GPU, dtype, head size and mask. The backends
save and allocate very different bytes, so the choice is made here by CUDA's rules and
the chosen aten op is traced.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (``select_sdp_backend`` and
the ``check_*`` functions) and attention.cpp (``scaled_dot_product_attention``).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from budgetfit.tracing.cuda.dispatch.dispatch_modes import in_selective_checkpoint
from budgetfit.tracing.cuda.target import CudaTarget

Backend = Literal["flash", "efficient", "cudnn", "math"]

FLASH_MAX_HEAD_DIM = 256
CUDNN_MAX_HEAD_DIM = 128
CUDNN_WIDEST_HEAD_DIM = 256
CUDNN_DROPOUT_STEPS = 16  # it supports dropout probabilities of n / 16 only
DIMS = 4  # [batch, heads, length, head_dim]
HALF = (torch.float16, torch.bfloat16)
# Checked against these torch releases on compute capabilities 7.5 to 12.1.
CUDNN_DROPOUT_VERSION = (2, 12)  # before, cuDNN took any probability
OFFSET_VERSION = (2, 13)  # before, the efficient kernel took any offset
GROUPED_EFFICIENT_VERSION = (2, 14)
CUDNN_BACKWARD_VERSION = (2, 14)  # from here its limits are those of the backward
CUDNN_BACKWARD_WIDE = ((192, 128), (256, 256))  # head sizes of DeepSeek; the widest
# Capabilities on which torch >= 2.11 tries cuDNN first (runtime cuDNN > 9.15).
CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments of an SDPA call that the choice depends on."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    @property
    def needs_grad(self) -> bool:
        """Whether the call has a backward."""
        return torch.is_grad_enabled() and any(
            x.requires_grad for x in (self.query, self.key, self.value)
        )

    @property
    def grouped(self) -> bool:
        """Whether keys have fewer heads than queries (GQA)."""
        return self.query.size(-3) != self.key.size(-3)


def choose_backend(call: AttentionCall, target: CudaTarget) -> Backend:
    """Return the SDPA backend that CUDA would choose (``select_sdp_backend``)."""
    if _cudnn_first(target) and _cudnn_allowed(call, target):
        return "cudnn"
    if torch.backends.cuda.flash_sdp_enabled() and _flash_allowed(call, target):
        return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled() and _efficient_allowed(
        call, target
    ):
        return "efficient"
    return "math"


def _fused_shapes(call: AttentionCall, *, grouped: bool) -> bool:
    """Check what all fused kernels need; ``grouped``: whether they support GQA."""
    query, key, value = tensors = (call.query, call.key, call.value)
    if not all(x.dim() == DIMS and x.size(-2) and x.stride(-1) == 1 for x in tensors):
        return False
    if call.mask is not None and call.mask.stride(-1) != 1:
        return False
    if not query.size(0) == key.size(0) == value.size(0):
        return False
    if key.size(1) != value.size(1):
        return False
    if call.enable_gqa and grouped:
        return query.size(1) % key.size(1) == 0
    return not call.grouped


def _flash_allowed(call: AttentionCall, target: CudaTarget) -> bool:
    head_dim = call.query.size(-1)
    if target.compute_capability < (8, 0) or call.query.dtype not in HALF:
        return False
    if call.mask is not None or not _fused_shapes(call, grouped=True):
        return False
    if not head_dim == call.key.size(-1) == call.value.size(-1) <= FLASH_MAX_HEAD_DIM:
        return False
    if call.is_causal and call.query.size(-2) != call.key.size(-2):
        return False
    # Consumer GPUs lack the shared memory for the backward of the largest heads.
    capability = target.compute_capability
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return not (
        small
        and call.needs_grad
        and (192 < head_dim <= 224 or (head_dim > 224 and call.dropout_p > 0))  # noqa: PLR2004 - the kernel's own limits
    )


def _efficient_allowed(call: AttentionCall, target: CudaTarget) -> bool:
    dtype = call.query.dtype
    allowed: tuple[torch.dtype, ...] = (*HALF, torch.float32)
    if target.compute_capability < (8, 0):
        allowed = (torch.float16, torch.float32)
    grouped = target.torch_version >= GROUPED_EFFICIENT_VERSION
    if dtype not in allowed or not _fused_shapes(call, grouped=grouped):
        return False
    alignment = _gemm_alignment(dtype, target.compute_capability)
    checks_offset = (
        target.torch_version >= OFFSET_VERSION and target.compute_capability >= (8, 0)
    )
    if checks_offset and any(
        x.storage_offset() % alignment for x in (call.query, call.key, call.value)
    ):
        return False
    return call.query.size(-1) % alignment == 0 and call.value.size(-1) % alignment == 0


def _gemm_alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Return what head sizes must be multiples of (``minimum_gemm_alignment``)."""
    half = dtype in HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = 4 if capability >= (8, 0) else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def _cudnn_first(target: CudaTarget) -> bool:
    """Return whether cuDNN is tried first, whatever torch.backends.cudnn.enabled is."""
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and target.compute_capability in CUDNN_FIRST
    )


def _cudnn_allowed(call: AttentionCall, target: CudaTarget) -> bool:
    if call.query.dtype not in HALF or not _fused_shapes(call, grouped=True):
        return False
    version = target.torch_version
    sixteenths = float(call.dropout_p * CUDNN_DROPOUT_STEPS).is_integer()
    one_query = call.query.size(-2) == 1
    blackwell = target.compute_capability >= (10, 0)
    return (
        _cudnn_head_dims(call, target)
        and (sixteenths or version < CUDNN_DROPOUT_VERSION)
        and call.key.size(-2) > 1
        and not (call.dropout_p and one_query)
        and not (version == (2, 14) and blackwell and one_query)
        and (call.mask is None or _cudnn_mask(call.mask))
    )


def _cudnn_head_dims(call: AttentionCall, target: CudaTarget) -> bool:
    sizes = call.query.size(-1), call.value.size(-1)
    if any(size % 8 for size in sizes):
        return False
    if target.torch_version >= CUDNN_BACKWARD_VERSION:
        wide = not call.needs_grad or sizes in CUDNN_BACKWARD_WIDE
    else:
        wide = target.compute_capability == (9, 0) or sizes == CUDNN_BACKWARD_WIDE[0]
    return max(sizes) <= (CUDNN_WIDEST_HEAD_DIM if wide else CUDNN_MAX_HEAD_DIM)


def _cudnn_mask(mask: torch.Tensor) -> bool:
    """Check as ``check_attn_mask_shape``; the call itself checks broadcasting."""
    return mask.dim() in {2, DIMS} and not mask.requires_grad


def run_attention(
    call: AttentionCall, target: CudaTarget, scale: float | None
) -> torch.Tensor:
    """Run the aten op of the chosen backend, with its inputs prepared as on CUDA."""
    backend = choose_backend(call, target)
    mask = _float_mask(call.mask, call.query.dtype)
    aten = torch.ops.aten
    query, key, value = call.query, call.key, call.value
    if backend == "flash":
        head_dim = query.size(-1)
        scale = scale if scale is not None else head_dim**-0.5
        query, key, value = (_pad_last(x, 8) for x in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, call.dropout_p, call.is_causal, scale=scale
        )[0]
        return out if out.size(-1) == head_dim else out[..., :head_dim]
    if backend not in {"cudnn", "efficient"}:
        return _math_attention(call, mask, scale)
    if backend == "efficient" and mask is not None:
        mask = _aligned_mask(mask).expand(*query.shape[:3], key.size(2))
    attention = getattr(aten, f"_scaled_dot_product_{backend}_attention")
    return attention(
        query,
        key,
        value,
        mask,
        call.needs_grad,
        call.dropout_p,
        call.is_causal,
        scale=scale,
    )[0]


def _math_attention(
    call: AttentionCall, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Run math attention (``_scaled_dot_product_attention_math``)."""
    # ATen's composite adds the mask out of place for tensor subclasses, as fake tensors
    # are, and under a dispatch mode, else in place. Tensors are allocated and freed in
    # the order of the compiled function: arguments and variables from last to first.
    dtype = call.query.dtype
    query_used, key_used, value_used = call.query, call.key, call.value
    if dtype in HALF:  # computed in fp32 for accuracy
        query_used, key_used, value_used = (
            x.float() for x in (query_used, key_used, value_used)
        )
    factor = abs(scale if scale is not None else query_used.size(-1) ** -0.5) ** 0.5
    query = query_used * (-factor if scale is not None and scale < 0 else factor)
    if call.is_causal:
        ones = torch.ones(query.size(-2), key_used.size(-2), dtype=torch.bool)
        lower = ones.tril()
        del ones
        mask = _float_mask(lower, query.dtype)
        del lower
    key, value = key_used, value_used
    if call.enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    weights = query @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        weights = weights + mask if in_selective_checkpoint() else weights.add_(mask)
    weights = torch.ops.aten._safe_softmax(weights, -1)
    if call.dropout_p > 0:
        weights = torch.ops.aten.dropout(weights, call.dropout_p, True)
    second = weights.to(dtype)  # the composite's second, unused result
    out = (weights @ value).to(dtype)
    del weights, value, key, query, mask, value_used, key_used, query_used, second
    return out


def _float_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Convert a boolean mask to an additive one (``convert_boolean_attn_mask``)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, masked = (torch.scalar_tensor(x, dtype=dtype) for x in (0.0, float("-inf")))
    return torch.where(mask, zero, masked)


def _aligned_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pad the mask's rows to the next multiple of 8, if not aligned (``pad_bias``)."""
    width = mask.size(-1)
    if width % 8 == 0 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    return torch.nn.functional.pad(mask, (0, 8 - width % 8))[..., :width]


def _pad_last(x: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -x.size(-1) % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
