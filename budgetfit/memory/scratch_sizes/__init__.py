"""Rules for the scratch memory that CUDA kernels allocate, by GPU and shape.

Input: a rule's name and arguments from a trace. Output: byte counts
(``rules.scratch_bytes``). Importing this package registers all rules; each file has the
rules of the ops in the file of ``tracing.cuda.kernel_memory`` with the same name, and
cites their source. All are compared byte for byte with PyTorch's host code in
``tests/accuracy/op_level``. Open ``rules.py`` first.
"""

from budgetfit.memory.scratch_sizes import (  # noqa: F401 - registers
    attention,
    indexing,
    matmul,
    norms,
    reductions,
    sharding,
)
