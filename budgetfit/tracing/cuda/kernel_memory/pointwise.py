"""Pointwise ops: casts to a common dtype, scalars as tensors, outputs in another order.

Sources: ``TensorCompare.cpp`` (``where``, ``isinf``), ``Pow.cpp``, ``Dropout.cu`` and
``Distributions.cu`` in ``aten/src/ATen/native``.
"""

from __future__ import annotations

from budgetfit.tracing.cuda.kernel_memory.registry import (
    HALVES,
    OUTPUTS,
    SINGLE_BYTES,
    Call,
    Steps,
    buffer,
    copy_of,
    kernel_memory,
)
from budgetfit.tracing.records import Output

NUMBER_BYTES = 8


@kernel_memory("where.self")
def where(call: Call) -> Steps:
    """Casts to the dtype of the result."""
    for tensor in call.args[1:3]:
        if tensor.dtype != call.out.dtype:
            yield copy_of(tensor, call.out.element_size())
    yield OUTPUTS


@kernel_memory("isinf")
def isinf(call: Call) -> Steps:
    """Absolute values."""
    if call.args[0].is_floating_point():
        yield copy_of(call.args[0])
    yield OUTPUTS


@kernel_memory("pow.Scalar")
def pow_scalar(_call: Call) -> Steps:
    """The base, as a tensor."""
    yield buffer(NUMBER_BYTES)


@kernel_memory("bernoulli.default")
def bernoulli(call: Call) -> Steps:
    """Probabilities in fp32, where they have 16 bits."""
    if call.args[0].dtype in HALVES:
        yield copy_of(call.args[0], SINGLE_BYTES)


@kernel_memory("native_dropout")
def dropout(_call: Call) -> Steps:
    """The mask comes first."""
    yield Output(1)
    yield OUTPUTS


@kernel_memory("log_sigmoid_forward")
def log_sigmoid(_call: Call) -> Steps:
    """A buffer that only CPUs fill."""
    yield Output(0)
    yield Output(1, size_bytes=0)
