"""Scratch of the reductions: sum, mean, norms, extrema, variance, any and all.

Which dtype a kernel accumulates in, and how it reads, decide the size: sources are the
``Reduce*Kernel.cu`` files of ``aten/src/ATen/native/cuda`` and ``make_reduction`` in
``ReduceOpsUtils.h`` (which copies the input where the dtype must change first).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from budgetfit.tracing.cuda_semantics.scratch_registry import (
    Args,
    Kwargs,
    Scratch,
    copy_of,
    scratch,
    temporary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
PAIR_BYTES = 16  # a value and its index, aligned
WELFORD_BYTES = {torch.float64: 32}  # mean, squared distance, counts; else 16


def reduction(
    tensor: Tensor,
    dims: object,
    *,
    accumulate_bytes: int,
    input_vector: int,
    out_dtype: torch.dtype,
) -> Scratch:
    """Return the scratch of reducing ``tensor`` over ``dims`` (None or []: all)."""
    ndim = tensor.dim()
    if dims is None or dims == []:
        chosen = range(ndim)
    else:
        chosen = [dims] if isinstance(dims, int) else dims  # type: ignore[assignment]
    mask = sum(1 << d for d in {int(d) % max(ndim, 1) for d in chosen})
    private = accumulate_bytes > out_dtype.itemsize or (
        tensor.dtype in HALVES and out_dtype == tensor.dtype
    )
    return scratch(
        "reduction",
        tensor.element_size(),
        accumulate_bytes,
        input_vector,
        private,
        mask,
        int(tensor.storage_offset()),
        *tensor.shape,
        *tensor.stride(),
    )


def _accumulator(dtype: torch.dtype) -> int:
    return 4 if dtype in HALVES else dtype.itemsize


def _vector(dtype: torch.dtype) -> int:
    return 8 if dtype in HALVES else 4


@temporary("sum.default", "sum.dim_IntList", "mean.default", "mean.dim")
def sums(args: Args, _kwargs: Kwargs, out: Tensor) -> Iterator[Scratch]:
    """Sums and means; another output dtype makes a copy of the input first."""
    tensor, dims = args[0], args[1] if len(args) > 1 else None
    dtype = tensor.dtype
    if dtype != out.dtype and not (dtype in HALVES and out.dtype == torch.float32):
        yield copy_of(tensor, out.element_size())
        tensor = torch.empty_like(tensor, dtype=out.dtype)
    yield reduction(
        tensor,
        dims,
        accumulate_bytes=_accumulator(tensor.dtype),
        input_vector=_vector(tensor.dtype),
        out_dtype=out.dtype,
    )
