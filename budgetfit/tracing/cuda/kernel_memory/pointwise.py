"""Pointwise ops: casts to a common dtype, scalars as tensors, outputs in another order.

Sources: ``TensorCompare.cpp`` (``where``, ``isinf``), ``UnaryOps.cpp``, ``Pow.cpp``,
``Dropout.cu`` and ``Distributions.cu`` in ``aten/src/ATen/native``.
"""

from __future__ import annotations

import torch

from budgetfit.tracing.cuda.kernel_memory.registry import (
    HALVES,
    OUTPUTS,
    SINGLE_BYTES,
    Call,
    Steps,
    Unverified,
    buffer,
    copy_of,
    freed_at_once,
    kernel_memory,
    resized,
)
from budgetfit.tracing.records import Free, Output

NUMBER_BYTES = 8
aten = torch.ops.aten
SCALAR_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


@kernel_memory("where.self")
def where(call: Call) -> Steps:
    """Casts to the dtype of the result."""
    for tensor in call.args[1:3]:
        if tensor.dtype != call.out.dtype:
            yield copy_of(tensor, call.out.element_size())
    yield OUTPUTS


@kernel_memory("clamp", "clamp_min", "clamp_max")
def clamp(call: Call) -> Steps:
    """Casts integers that are compared with a fraction."""
    if call.args[0].dtype != call.out.dtype and call.func in SCALAR_CLAMPS:
        yield copy_of(call.args[0], call.out.element_size())
    yield OUTPUTS


@kernel_memory("normal.Tensor_float")
def draw_around_means(call: Call) -> Steps:
    """Standard deviations, of which only the shape is used."""
    yield OUTPUTS
    yield copy_of(call.out)


@kernel_memory("pow.Tensor_Scalar")
def pow_tensor(call: Call) -> Steps:
    """A cast of booleans, and of integers where the exponent is a fraction."""
    if call.args[0].dtype != call.out.dtype:
        yield copy_of(call.args[0], call.out.element_size())
    yield OUTPUTS


@kernel_memory("native_dropout_backward", "_prelu_kernel")
def resized_output(call: Call) -> Steps:
    """An output in the first input's size, resized if another one is larger."""
    yield from resized(call.args[0], call.out)


@kernel_memory("log_sigmoid_backward")
def log_sigmoid_backward(call: Call) -> Steps:
    """As ``resized_output``; a buffer of another dtype is not represented."""
    if call.args[2].dtype != call.args[1].dtype:
        yield Unverified()
    yield from resized(call.args[0], call.out)


@kernel_memory("threshold_backward", "mish_backward")
def gradient(call: Call) -> Steps:
    """Inputs of different dtypes are not represented."""
    if call.args[0].dtype != call.args[1].dtype:
        yield Unverified()


@kernel_memory("isinf")
def isinf(call: Call) -> Steps:
    """Absolute values."""
    if call.args[0].is_floating_point():
        yield copy_of(call.args[0])
    yield OUTPUTS


@kernel_memory("abs", "angle")
def size_or_angle(call: Call) -> Steps:
    """Of complex numbers as complex ones, which are then copied into real ones."""
    if call.args[0].is_complex():
        yield copy_of(call.args[0])
        if call.func is aten.angle.default:
            yield OUTPUTS


@kernel_memory("pow.Scalar")
def pow_scalar(_call: Call) -> Steps:
    """The base, as a tensor."""
    yield buffer(NUMBER_BYTES)


@kernel_memory("ldexp")
def ldexp(call: Call) -> Steps:
    """Two, as a tensor, and its powers, if the exponents are no integers."""
    tensor, exponents = call.args[:2]
    if tensor.is_floating_point() and not exponents.is_floating_point():
        return
    each = exponents.element_size() if exponents.is_floating_point() else SINGLE_BYTES
    powers = copy_of(exponents, each)
    if tensor.dtype in HALVES:
        two = buffer(tensor.element_size())
        yield two
        yield powers
        yield Free(two)
    else:
        yield powers
        yield from freed_at_once(buffer(NUMBER_BYTES))
    yield OUTPUTS


@kernel_memory("_efficientzerotensor")
def zeros_without_memory(_call: Call) -> Steps:
    """Zeros that stand for a gradient or tangent that is not there."""
    yield Output(0, size_bytes=0)


@kernel_memory("mvlgamma", "mvlgamma_")
def mvlgamma(call: Call) -> Steps:
    """The logarithms of ``p`` gamma functions, which are then summed."""
    each, terms = call.out.element_size(), call.args[1]
    steps = buffer(terms * each)
    yield steps
    yield buffer(terms * call.out.numel() * each)
    yield Free(steps)
    if call.func is aten.mvlgamma_.default:
        yield copy_of(call.out)
    yield OUTPUTS


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


@kernel_memory("_foreach_pow.ScalarAndTensor")
def foreach_pow(call: Call) -> Steps:
    """Exponents that are integers, or of several dtypes, are not represented."""
    dtypes = {tensor.dtype for tensor in call.args[1]}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        yield Unverified()
