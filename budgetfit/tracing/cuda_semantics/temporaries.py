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

from budgetfit.tracing.cuda_semantics import (
    attention_temporaries,
    batch_norm_temporaries,
    convolution_backward_temporaries,
    convolution_temporaries,
    foreach_temporaries,
    image_temporaries,
    index_temporaries,
    loss_temporaries,
    matmul_temporaries,
    norm_temporaries,
    pointwise_temporaries,
    recurrent_temporaries,
    reduction_temporaries,
)
from budgetfit.tracing.cuda_semantics.scratch_registry import (
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
    "attention_temporaries",
    "batch_norm_temporaries",
    "convolution_backward_temporaries",
    "convolution_temporaries",
    "foreach_temporaries",
    "image_temporaries",
    "index_temporaries",
    "kept_output",
    "loss_temporaries",
    "matmul_temporaries",
    "norm_temporaries",
    "output_bytes_of",
    "pointwise_temporaries",
    "recurrent_temporaries",
    "reduction_temporaries",
    "scratch",
    "steps_of",
    "temporaries_of",
    "temporary",
]
