"""Memory that the CUDA kernels of aten ops allocate, unseen on CPU tensors.

Importing this package registers all ops; ``kernel_steps`` looks them up. To add an op,
decorate a function with ``kernel_memory`` in the file of its family; where a size is
not affine in the batch size, add a rule to the file of ``memory.scratch_sizes`` that
has the same name. Open ``registry.py`` first.
"""

from __future__ import annotations

from budgetfit.tracing.cuda.kernel_memory import (  # noqa: F401 - registers
    attention,
    contiguous,
    convolution,
    distances,
    images,
    indexing,
    losses,
    matmul,
    norms,
    pointwise,
    recurrent,
    reductions,
    sharding,
)
