"""Scratch memory of foreach ops: gradient norms.

Source: ``ForeachReduceOp.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Kwargs,
    Scratch,
    buffer,
    register_scratch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 65536  # elements that one thread block reduces
SINGLE_BYTES = 4


@register_scratch("_foreach_norm")
def foreach_norm(args: Args, _kwargs: Kwargs, _out: object) -> Iterator[Scratch]:
    """A partial result for each chunk of each tensor."""
    tensors = args[0]
    chunks = max(-(-tensor.numel() // CHUNK) for tensor in tensors)
    partial = max(tensors[0].element_size(), SINGLE_BYTES)
    yield buffer(len(tensors) * chunks * partial, when="before")
