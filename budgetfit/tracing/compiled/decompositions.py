"""Decompositions of ops for a CUDA GPU, in a graph whose tensors are still on the CPU.

torch's own ask a tensor for its device. Norms of 16-bit tensors save their statistics
in fp32 on CUDA and in 16 bits on a CPU; random masks and products of one column by one
row are fused into other kernels on CUDA alone. Sources (torch 2.13):
torch/_inductor/decomposition.py, ``native_layer_norm`` in torch/_refs/__init__.py,
``native_batch_norm_helper`` and ``log_sigmoid_forward`` in
torch/_decomp/decompositions.py, torch/_decomp/decompositions_for_rng.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp.decompositions import pw_cast_for_opmath

_HALVES = (torch.float16, torch.bfloat16)


def cuda_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return inductor's table of decompositions, as they are for CUDA."""
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415 - takes seconds

    aten = torch.ops.aten
    norms = (
        aten.native_layer_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._batch_norm_with_update.default,
        aten._batch_norm_with_update_functional.default,
    )
    table = dict(select_decomp_table())
    for op in norms:
        if op in table:
            table[op] = functools.partial(_with_fp32_statistics, table[op])
    log_sigmoid = aten.log_sigmoid_forward.default
    table[log_sigmoid] = functools.partial(_without_buffer, table[log_sigmoid])
    table[aten.bernoulli.p] = _bernoulli
    table[aten.bernoulli_.float] = _bernoulli_in_place
    table[aten.mm.default] = _mm
    table[aten.addmm.default] = _addmm
    table[aten.bmm.default] = _bmm
    return table


def _with_fp32_statistics(
    decomposition: Callable[..., Any], x: torch.Tensor, *args: object, **kwargs: object
) -> object:
    if x.dtype not in _HALVES:
        return decomposition(x, *args, **kwargs)
    convert = torch.ops.prims.convert_element_type.default
    out, *others = decomposition(convert(x, torch.float32), *args, **kwargs)
    return (convert(out, x.dtype), *others)


def _without_buffer(
    decomposition: Callable[..., Any], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, _ = decomposition(x)
    return out, x.new_zeros(0)


def _bernoulli(x: torch.Tensor, p: float = 0.5, **_: object) -> torch.Tensor:
    return torch.rand_like(x, dtype=torch.float32) < p


def _bernoulli_in_place(x: torch.Tensor, p: float = 0.5, **_: object) -> torch.Tensor:
    return x.copy_(_bernoulli(x, p))


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _product(left, right) if _is_column_by_row(left, right) else NotImplemented


def _addmm(
    added: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    if not _is_column_by_row(left, right):
        return NotImplemented
    return _sum(added, left, right, beta, alpha)


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _product(left, right).contiguous() if left.size(2) == 1 else NotImplemented


def _is_column_by_row(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.size(1) == 1 and left.size(0) != 1 and right.size(1) != 1


@pw_cast_for_opmath
def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left * right


@pw_cast_for_opmath
def _sum(
    added: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    beta: float,
    alpha: float,
) -> torch.Tensor:
    return alpha * (left * right) + beta * added
