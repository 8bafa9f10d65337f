"""Scratch memory that the CUDA kernels of aten ops allocate, unseen on CPU tensors.

Importing this package registers all ops; ``scratch_of`` and ``kernel_steps`` look them
up. To add an op, register a function in one of the modules imported here, and a rule in
``memory.scratch_sizes`` if the size is not affine in the batch size. Open
``registry.py`` first.

``register_scratch``: the memory is taken to live until the op ends. If a kernel frees a
buffer before it allocates the next, only the moment with the most memory is
represented: the peak inside the op is exact, the order of small requests is not.
``register_steps``: allocations and frees in the order of the kernel's host code.
"""

from __future__ import annotations

from budgetfit.tracing.cuda.kernel_memory import (
    attention,
    batch_norm,
    convolution,
    convolution_backward,
    foreach,
    image,
    indexing_and_sorting,
    loss,
    matmul,
    norm,
    pointwise,
    recurrent,
    reduction,
)
from budgetfit.tracing.cuda.kernel_memory.registry import (
    Scratch,
    kernel_steps,
    output_bytes_of,
    register_output_bytes,
    register_scratch,
    scratch,
    scratch_of,
)

__all__ = [
    "Scratch",
    "attention",
    "batch_norm",
    "convolution",
    "convolution_backward",
    "foreach",
    "image",
    "indexing_and_sorting",
    "kernel_steps",
    "loss",
    "matmul",
    "norm",
    "output_bytes_of",
    "pointwise",
    "recurrent",
    "reduction",
    "register_output_bytes",
    "register_scratch",
    "scratch",
    "scratch_of",
]
