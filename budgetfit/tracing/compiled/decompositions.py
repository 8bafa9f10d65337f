"""Decompositions of ops for a CUDA GPU, in a graph whose tensors are still on the CPU.

Norms of 16-bit tensors save their statistics in fp32 on CUDA and in 16 bits on a CPU.
Sources (torch 2.13): ``native_layer_norm`` in torch/_refs/__init__.py,
``native_batch_norm_helper`` in torch/_decomp/decompositions.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

_HALVES = (torch.float16, torch.bfloat16)


def cuda_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return inductor's table of decompositions, with statistics in fp32."""
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
    return table


def _with_fp32_statistics(
    decomposition: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if x.dtype not in _HALVES:
        return decomposition(x, *args, **kwargs)
    convert = torch.ops.prims.convert_element_type.default
    out, *others = decomposition(convert(x, torch.float32), *args, **kwargs)
    return (convert(out, x.dtype), *others)
