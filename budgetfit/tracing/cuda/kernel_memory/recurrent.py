"""Scratch memory of fused LSTM and GRU cells: workspaces, and sums for the biases.

Source: ``aten/src/ATen/native/cuda/RNN.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.tracing.cuda.kernel_memory.reduction import (
    InputLayout,
    input_vec_size,
    reduction,
)
from budgetfit.tracing.cuda.kernel_memory.registry import (
    Alloc,
    Args,
    Free,
    KernelStep,
    Kwargs,
    Output,
    register_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@register_steps("_thnn_fused_lstm_cell")
def lstm_cell(_args: Args, _kwargs: Kwargs, _out: object) -> Iterator[KernelStep]:
    """The workspace is allocated before the states."""
    yield from (Output(2), Output(0), Output(1))


@register_steps("_thnn_fused_gru_cell")
def gru_cell(_args: Args, _kwargs: Kwargs, _out: object) -> Iterator[KernelStep]:
    """The workspace is allocated before the state."""
    yield from (Output(1), Output(0))


@register_steps("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    _args: Args, _kwargs: Kwargs, out: tuple[Tensor | None, ...]
) -> Iterator[KernelStep]:
    """The gates' gradient, summed over the rows for the biases."""
    yield from (Output(0), Output(1))
    if out[2] is not None and out[0] is not None:
        yield from _row_sum(out[0], 2)


@register_steps("_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    _args: Args, _kwargs: Kwargs, out: tuple[Tensor | None, ...]
) -> Iterator[KernelStep]:
    """Both gradients of the gates, summed over the rows for the biases."""
    yield from (Output(0), Output(1), Output(2))
    for position in (0, 1):
        gates = out[position]
        if out[3] is not None and gates is not None:
            yield from _row_sum(gates, 3 + position)


def _row_sum(gates: Tensor, index: int) -> Iterator[KernelStep]:
    yield Output(index)
    alloc = Alloc(
        reduction(
            InputLayout.of(gates),
            [0],
            input_vector=input_vec_size(gates.dtype),
            out_dtype=gates.dtype,
        )
    )
    yield from (alloc, Free(alloc))
