"""Which ops' CUDA kernels take memory that a trace on CPU tensors does not see.

Importing this module registers them all; ``temporaries_of`` answers. The next rule is
a few lines: a function in one of the rooms imported here, and a formula in
``memory.kernel_scratch`` where the size is not affine in the batch size.

Scratch that is registered with ``temporary`` is taken to live until the op ends. Where
a kernel frees a buffer before it allocates the next, only the moment with the most
memory is represented: the peak inside the op is exact, the order of small requests is
not. What is registered with ``in_steps`` has the order of the kernel's host code.
"""

from __future__ import annotations

from budgetfit.tracing.cuda.kernel_memory import (
    attention,
    batch_norm,
    convolution,
    convolution_backward,
    foreach,
    image,
    index,
    loss,
    matmul,
    norm,
    pointwise,
    recurrent,
    reduction,
)
from budgetfit.tracing.cuda.kernel_memory.registry import (
    Scratch,
    kept_output,
    output_bytes_of,
    scratch,
    steps_of,
    temporaries_of,
    temporary,
)

__all__ = [
    "Scratch",
    "attention",
    "batch_norm",
    "convolution",
    "convolution_backward",
    "foreach",
    "image",
    "index",
    "kept_output",
    "loss",
    "matmul",
    "norm",
    "output_bytes_of",
    "pointwise",
    "recurrent",
    "reduction",
    "scratch",
    "steps_of",
    "temporaries_of",
    "temporary",
]
