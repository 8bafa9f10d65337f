"""Fused LSTM and GRU cells: workspaces, and sums for the biases.

Source: ``aten/src/ATen/native/cuda/RNN.cu``.
"""

from __future__ import annotations

from budgetfit.tracing.cuda.kernel_memory.reductions import reduction
from budgetfit.tracing.cuda.kernel_memory.registry import (
    OUTPUTS,
    Call,
    Steps,
    freed_at_once,
    kernel_memory,
)
from budgetfit.tracing.records import Output


@kernel_memory("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def cell(call: Call) -> Steps:
    """The workspace, which is the last output, is allocated before the states."""
    yield Output(len(call.out) - 1)
    yield OUTPUTS


@kernel_memory("_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward")
def cell_backward(call: Call) -> Steps:
    """The gates' gradients, summed over the rows for the biases."""
    # Outputs of an LSTM cell: gates, cell state, bias. Of a GRU cell: the gates of
    # input and hidden state, hidden state, and the bias of either.
    lstm = len(call.out) == 3  # noqa: PLR2004
    biases = {2: 0} if lstm else {3: 0, 4: 1}  # and the gates that each sums up
    yield from (Output(k) for k in range(len(call.out) - len(biases)))
    for bias, gates in biases.items():
        data = call.out[gates]
        if call.out[min(biases)] is not None and data is not None:
            yield Output(bias)
            yield from freed_at_once(*reduction(data, [0], data.dtype))
