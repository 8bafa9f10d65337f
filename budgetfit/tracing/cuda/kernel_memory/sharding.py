"""Copies around the collectives of FSDP2.

Two kernels read addresses and sizes from a buffer that their host code fills. Source:
``aten/src/ATen/native/cuda/TensorShape.cu`` (``pack_vecs``) of torch 2.13. The ops are
FSDP2's own, in ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Call,
    Steps,
    buffer,
    freed_at_once,
    kernel_memory,
    scratch,
)


@kernel_memory("fsdp.split_with_sizes_copy.default")
def split_with_sizes_copy(call: Call) -> Steps:
    """Copy-out: the parts of an all-gather's output to the weights."""
    whole, sizes = call.args[:2]
    element = whole.element_size()
    parts = [size * element for size in sizes]
    # FSDP2 copies the rows of a matrix, one for each rank.
    yield from freed_at_once(*scratch("split_with_sizes_copy", whole.size(0), *parts))


@kernel_memory("fsdp.chunk_cat.default")
def chunk_cat(call: Call) -> Steps:
    """Copy-in of a reduce-scatter: the chunks of all gradients, rank by rank."""
    tensors, chunks = call.args[0], _argument(call, 2, "num_chunks")
    out = _argument(call, 3, "out")
    if _has_fast_path(tensors, out):
        sizes = [_chunk_bytes(each, chunks, out.element_size()) for each in tensors]
        yield from freed_at_once(*scratch("chunk_cat", *sizes))
        return
    padded = [tensor for tensor in tensors if tensor.size(0) % chunks]
    yield from freed_at_once(
        *(
            buffer(chunks * _chunk_bytes(each, chunks, each.element_size()))
            for each in padded
        )
    )


def _argument(call: Call, position: int, name: str) -> Any:
    return call.get(position, call.kwargs.get(name))


def _has_fast_path(tensors: list[Tensor], out: Tensor) -> bool:
    """Return whether one kernel copies all; else they are padded and concatenated."""
    types = tensors[0].dtype, out.dtype
    return (types[0] == types[1] or types == (torch.bfloat16, torch.float32)) and all(
        map(torch._prims_common.is_non_overlapping_and_dense_or_false, tensors)
    )


def _chunk_bytes(tensor: Tensor, chunks: int, element: int) -> int:
    """Return the bytes of a tensor's chunk, with the rows that pad it."""
    rows = -(-tensor.size(0) // chunks)
    return rows * prod(tensor.shape[1:]) * element
