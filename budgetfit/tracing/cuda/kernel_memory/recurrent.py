"""What fused recurrent cells take: workspaces first, and sums for the biases.

Source: ``aten/src/ATen/native/cuda/RNN.cu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.tracing.cuda.kernel_memory.reduction import (
    Input,
    reduction,
    vector,
)
from budgetfit.tracing.cuda.kernel_memory.registry import (
    Args,
    Born,
    Give,
    InnerStep,
    Kwargs,
    Take,
    in_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@in_steps("_thnn_fused_lstm_cell")
def lstm_cell(_args: Args, _kwargs: Kwargs, _out: object) -> Iterator[InnerStep]:
    """The workspace is made before the states."""
    yield from (Born(2), Born(0), Born(1))


@in_steps("_thnn_fused_gru_cell")
def gru_cell(_args: Args, _kwargs: Kwargs, _out: object) -> Iterator[InnerStep]:
    """The workspace is made before the state."""
    yield from (Born(1), Born(0))


@in_steps("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    _args: Args, _kwargs: Kwargs, out: tuple[Tensor | None, ...]
) -> Iterator[InnerStep]:
    """The gates' gradient is summed over the rows for the biases."""
    yield from (Born(0), Born(1))
    if out[2] is not None and out[0] is not None:
        yield from _row_sum(out[0], 2)


@in_steps("_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    _args: Args, _kwargs: Kwargs, out: tuple[Tensor | None, ...]
) -> Iterator[InnerStep]:
    """Both gradients of gates are summed over the rows."""
    yield from (Born(0), Born(1), Born(2))
    for position in (0, 1):
        gates = out[position]
        if out[3] is not None and gates is not None:
            yield from _row_sum(gates, 3 + position)


def _row_sum(gates: Tensor, output: int) -> Iterator[InnerStep]:
    yield Born(output)
    take = Take(
        reduction(
            Input.of(gates),
            [0],
            input_vector=vector(gates.dtype),
            out_dtype=gates.dtype,
        )
    )
    yield from (take, Give(take))
