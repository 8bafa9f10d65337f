"""Distances of all pairs of points, and their gradients.

Source: ``aten/src/ATen/native/cuda/DistanceKernel.cu`` and ``Distance.cpp``.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from budgetfit.tracing.cuda.kernel_memory.reductions import Layout, reduction
from budgetfit.tracing.cuda.kernel_memory.registry import (
    OUTPUTS,
    Call,
    Gemm,
    Steps,
    buffer,
    contiguous_copies,
    copy_of,
    freed_at_once,
    kernel_memory,
)
from budgetfit.tracing.records import Free

if TYPE_CHECKING:
    import torch


@kernel_memory("_cdist_backward")
def cdist_backward(call: Call) -> Steps:
    """Contiguous points, and the gradient of every pair, which is then summed."""
    grad, one, other, norm, distances = call.args
    yield from contiguous_copies(one, other, grad, distances)
    yield OUTPUTS
    batch = distances.numel() // max(prod(distances.shape[-2:]), 1)
    if norm:
        pairs = batch, other.shape[-2], one.shape[-2]
        yield from _summed((*pairs, one.shape[-1]), 1, one.dtype)


@kernel_memory("_pdist_backward")
def pdist_backward(call: Call) -> Steps:
    """The gradient of every pair but those of a point with itself, then summed."""
    grad, points, norm = call.args[:3]
    yield OUTPUTS
    if norm and grad.numel():
        shape = points.shape[0] - 1, *points.shape
        yield from _summed(shape, 0, points.dtype)


def _summed(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Steps:
    if size_bytes := prod(shape) * dtype.itemsize:
        yield buffer(size_bytes)
        yield from reduction(Layout.contiguous(dtype, shape), [dim], dtype)


@kernel_memory("_euclidean_dist")
def euclidean(call: Call) -> Steps:
    """One product of the points, each with its square and a 1 as further columns."""
    parts = []
    for points in call.args[:2]:
        column = buffer(prod(points.shape[:-1]) * points.element_size())
        squares = copy_of(points)
        yield squares
        yield column  # their sums
        yield from freed_at_once(
            *reduction(Layout.cast(points, points.dtype), [-1], points.dtype)
        )
        yield Free(squares)
        yield column  # ones
        wide = prod(points.shape[:-1]) * (points.shape[-1] + 2)
        parts.append((column, buffer(wide * points.element_size())))
    (column, left), (other_column, right) = parts
    doubled = copy_of(call.args[0])
    yield from (doubled, left, Free(column), Free(column), Free(doubled))
    yield from (right, Free(other_column), Free(other_column), OUTPUTS, Gemm())
    yield from (Free(right), Free(left))
