"""The dtypes that CUDA's kernels refuse, and fake tensors do not.

Each rule was seen on PyTorch's CUDA host code (torch 2.13): without them a plan would
fit, and its first step would end in torch's RuntimeError.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from budgetfit.tracing.cuda.kernel_memory.registry import Call

# Ops -> the positions of the arguments that must have one dtype.
_ONE_DTYPE: Final = {
    "mm": (0, 1),
    "mv": (0, 1),
    "addmm": (0, 1, 2),
    "addmv": (0, 1, 2),
    "_addmm_activation": (0, 1, 2),
    "index_add": (0, 3),
    "index_copy": (0, 3),
    "index_reduce": (0, 3),
    "index_put": (0, 2),
    "_index_put_impl": (0, 2),
    "put": (0, 2),
    "native_layer_norm": (0, 2, 3),
    "native_group_norm": (0, 1, 2),
    "binary_cross_entropy": (0, 1),
    "_embedding_bag": (0, 6),
    "grid_sampler_2d": (0, 1),
    "grid_sampler_3d": (0, 1),
    "_cdist_forward": (0, 1),
    "linalg_cross": (0, 1),
}
# Weights in 16 bits need an input in 16 bits; in fp32 they take both.
_BATCH_NORMS: Final = frozenset({"native_batch_norm", "_batch_norm_with_update"})
_NO_HALVES: Final = frozenset(
    {
        *("_cdist_forward", "_pdist_forward", "_ctc_loss", "histc", "polar"),
        *("special_ndtri", "special_erfcx", "special_log_ndtr"),
        *("_linalg_solve_ex", "linalg_cholesky_ex", "_linalg_svd", "_linalg_eigh"),
        *("linalg_qr", "linalg_lu_factor_ex", "linalg_solve_triangular"),
    }
)
_HALVES: Final = {torch.bfloat16: "BFloat16", torch.float16: "Half"}


def check_dtypes(call: Call) -> None:
    """Raise as torch does where the CUDA kernel does not take a call's dtypes."""
    name = call.func.overloadpacket.__name__.removesuffix("_")
    positions = _ONE_DTYPE.get(name, (0, 1) if name in _BATCH_NORMS else ())
    dtypes = [
        value.dtype
        for value in (call.args[n] for n in positions if n < len(call.args))
        if isinstance(value, torch.Tensor)
    ]
    if name in _BATCH_NORMS and dtypes[1:] == [torch.float32]:
        return
    for one, other in pairwise(dtypes):
        if one != other and call.func._overloadname != "dtype":
            raise RuntimeError(
                f"{name}: expected tensors of one dtype, but got {one} and {other}"
            )
    first = call.args[0] if call.args else None
    if name in _NO_HALVES and isinstance(first, torch.Tensor):
        half = _HALVES.get(first.dtype)
        if half is not None:
            raise RuntimeError(f"\"{name}\" not implemented for '{half}'")
