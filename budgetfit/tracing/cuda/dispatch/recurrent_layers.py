"""LSTM, GRU and RNN layers as CUDA runs them without cuDNN, and their single cells.

On a CPU torch multiplies the inputs of all steps at once, or calls oneDNN; on CUDA each
step has two matrix products and, for LSTM and GRU, a fused cell. With cuDNN the whole
layer is one kernel, whose buffers can only be measured on a GPU; cuDNN never runs
``nn.LSTMCell`` and ``nn.GRUCell``.

Source: ``aten/src/ATen/native/RNN.cpp`` (``_rnn_impl``, ``FullLayer``,
``FullBidirectionalLayer``, those of packed sequences and the cells).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

State = tuple["Tensor", ...]


class Weights(NamedTuple):
    """The parameters of one layer in one direction; biases and projection optional."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None


Cell = Callable[[Tensor, State, Weights], State]


def _lstm_cell(x: Tensor, state: State, weights: Weights) -> State:
    igates = torch.matmul(x, weights.weight_ih.t())
    hgates = torch.matmul(state[0], weights.weight_hh.t())
    out, cell, _ = aten._thnn_fused_lstm_cell(
        igates, hgates, state[1], weights.bias_ih, weights.bias_hh
    )
    if weights.weight_hr is not None:
        out = torch.matmul(out, weights.weight_hr.t())
    return out, cell


def _gru_cell(x: Tensor, state: State, weights: Weights) -> State:
    igates = torch.matmul(x, weights.weight_ih.t())
    hgates = torch.matmul(state[0], weights.weight_hh.t())
    return (
        aten._thnn_fused_gru_cell(
            igates, hgates, state[0], weights.bias_ih, weights.bias_hh
        )[0],
    )


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(x: Tensor, state: State, weights: Weights) -> State:
        linear = torch.nn.functional.linear
        summed = linear(state[0], weights.weight_hh, weights.bias_hh)
        part = linear(x, weights.weight_ih, weights.bias_ih)
        summed.add_(part)
        result = (activation(summed),)
        del part, summed  # in this order, after the activation
        return result

    return cell


def _one_direction(
    cell: Cell, steps: Sequence[Tensor], state: State, weights: Weights
) -> tuple[list[Tensor], State]:
    outputs = []
    for x in steps:
        state = cell(x, state, weights)
        outputs.append(state[0])
    return outputs, state


def _one_layer(
    cell: Cell, x: Tensor, states: Sequence[State], weights: Sequence[Weights]
) -> tuple[Tensor, list[State]]:
    """Return the outputs of one layer and its last states, by direction."""
    steps = x.unbind(0)
    outputs, last = _one_direction(cell, steps, states[0], weights[0])
    joined = torch.stack(outputs, 0)
    if len(weights) == 1:
        return joined, [last]
    backwards, other = _one_direction(cell, steps[::-1], states[1], weights[1])
    parts = [joined, torch.stack(backwards[::-1], 0)]
    return torch.cat(parts, joined.dim() - 1), [last, other]


def _rows(state: State, start: int, end: int) -> State:
    return tuple(each.narrow(0, start, end - start) for each in state)


def _joined(states: Sequence[State]) -> State:
    return tuple(torch.cat(parts, 0) for parts in zip(*states, strict=True))


def _packed_forwards(
    cell: Cell, rows: Tensor, counts: Sequence[int], state: State, weights: Weights
) -> tuple[Tensor, State]:
    """Run the steps of a packed sequence, each of fewer samples than the one before."""
    outputs, ended = [], []
    first, before = 0, counts[0]
    for count in counts:
        x = rows.narrow(0, first, count)
        first += count
        if count < before:
            ended.append(_rows(state, count, before))
            state = _rows(state, 0, count)
        before = count
        state = cell(x, state, weights)
        outputs.append(state[0])
    return torch.cat(outputs, 0), _joined([state, *ended[::-1]])


def _packed_backwards(
    cell: Cell, rows: Tensor, counts: Sequence[int], initial: State, weights: Weights
) -> tuple[Tensor, State]:
    """Run the steps from the last one on, each of more samples."""
    outputs = []
    end, before = len(rows), counts[-1]
    state = _rows(initial, 0, before)
    for count in reversed(counts):
        if count > before:
            state = _joined([state, _rows(initial, before, count)])
        x = rows.narrow(0, end - count, count)
        end, before = end - count, count
        state = cell(x, state, weights)
        outputs.append(state[0])
    return torch.cat(outputs[::-1], 0), state


def _packed_layer(
    cell: Cell,
    rows: Tensor,
    states: Sequence[State],
    weights: Sequence[Weights],
    counts: Sequence[int],
) -> tuple[Tensor, list[State]]:
    """Return the same as ``_one_layer``, of ``counts`` samples in each step."""
    outputs, last = _packed_forwards(cell, rows, counts, states[0], weights[0])
    if len(weights) == 1:
        return outputs, [last]
    others, other = _packed_backwards(cell, rows, counts, states[1], weights[1])
    return torch.cat([outputs, others], -1), [last, other]


def _layers(  # noqa: PLR0913 - what torch passes
    cell: Cell,
    x: Tensor,
    states: Sequence[State],
    weights: Sequence[Weights],
    *,
    dropout: float,
    bidirectional: bool,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, list[State]]:
    """Return the outputs of the last layer and the last states of each.

    ``counts``: samples in each step of a packed sequence.
    """
    directions = 2 if bidirectional else 1
    last: list[State] = []
    for layer in range(0, len(weights), directions):
        both = slice(layer, layer + directions)
        args = cell, x, states[both], weights[both]
        x, ends = _packed_layer(*args, counts) if counts else _one_layer(*args)
        del args
        last += ends
        if dropout and layer + directions < len(weights):
            x = torch.dropout(x, dropout, train=True)
    return x, last


def _weights(
    params: Sequence[Tensor], *, has_biases: bool, projects: bool
) -> list[Weights]:
    size = 2 + 2 * has_biases + projects
    result = []
    for start in range(0, len(params), size):
        weight_ih, weight_hh, *rest = params[start : start + size]
        bias_ih, bias_hh = rest[:2] if has_biases else (None, None)
        weight_hr = rest[-1] if projects else None
        result.append(Weights(weight_ih, weight_hh, bias_ih, bias_hh, weight_hr))
    return result


def layer_of(cell: Cell) -> Callable[..., State]:
    """Return ``lstm.input``, ``gru.input``, ``rnn_tanh.input`` ... for a cell."""

    def layer(  # noqa: PLR0913, PLR0917 - aten's signature
        x: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
        *,
        counts: Sequence[int] | None = None,
    ) -> State:
        """Run it as CUDA without cuDNN; ``counts`` as in ``_layers``."""
        del num_layers
        states = (hx,) if isinstance(hx, Tensor) else hx
        projects = states[0].size(2) != states[-1].size(2)  # of an LSTM
        out, last = _layers(
            cell,
            x.transpose(0, 1) if batch_first else x,
            list(zip(*(each.unbind(0) for each in states), strict=True)),
            _weights(params, has_biases=has_biases, projects=projects),
            dropout=dropout if train else 0.0,
            bidirectional=bidirectional,
            counts=counts,
        )
        out = out.transpose(0, 1) if batch_first else out
        return out, *(torch.stack(each, 0) for each in zip(*last, strict=True))

    return layer


def over_packed(layer: Callable[..., object]) -> Callable[..., object]:
    """Return ``lstm.data``, ``gru.data`` ... for ``lstm.input``, ``gru.input`` ..."""

    def packed(rows: Tensor, batch_sizes: Tensor, *settings: object) -> object:
        return layer(rows, *settings, counts=_numbers(batch_sizes))

    return packed


def _numbers(batch_sizes: Tensor) -> list[int]:
    """Return the values of a tensor in host memory, which is none of the fakes."""
    with _disable_current_modes():
        found: list[int] = batch_sizes.tolist()
    return found


def pad_packed_sequence(
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    """Return the padded rows and, in host memory, the length of each sample."""
    # Torch's C++ writes the lengths into a tensor that it has just allocated, which is
    # a fake without memory here. Consecutive time steps with as many samples
    # are copied at once. Source: ``_pad_packed_sequence`` in ``PackedSequence.cpp``.
    counts = _numbers(batch_sizes)
    with _disable_current_modes():
        samples = torch.arange(counts[0])[:, None]
        lengths = (samples < batch_sizes).sum(1)
    steps = max(len(counts), total_length)
    output = data.new_full((steps, counts[0], *data.shape[1:]), padding_value)
    step = row = 0
    for count, group in itertools.groupby(counts):
        length = len(list(group))
        rows = data.narrow(0, row, length * count)
        target = output.narrow(0, step, length).narrow(1, 0, count)
        target.copy_(rows.view(length, count, *data.shape[1:]))
        step, row = step + length, row + length * count
    return (output.transpose(0, 1) if batch_first else output), lengths


def lstm_cell(
    x: Tensor,
    hx: Sequence[Tensor],
    weight_ih: Tensor,
    weight_hh: Tensor,
    *biases: Tensor | None,
) -> State:
    """Run ``lstm_cell`` as CUDA: ``biases`` may be left out."""
    return _lstm_cell(x, tuple(hx), _cell_weights(weight_ih, weight_hh, *biases))


def gru_cell(
    x: Tensor, hx: Tensor, weight_ih: Tensor, weight_hh: Tensor, *biases: Tensor | None
) -> Tensor:
    """Run ``gru_cell`` as CUDA: ``biases`` may be left out."""
    return _gru_cell(x, (hx,), _cell_weights(weight_ih, weight_hh, *biases))[0]


def _cell_weights(
    weight_ih: Tensor,
    weight_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Weights:
    return Weights(weight_ih, weight_hh, b_ih, b_hh, None)


CUDNN_NOTE = (
    "recurrent layers run in cuDNN on this card: its workspaces are not in the "
    "prediction"
)
# Those of nn.RNNCell are the same ops on either device.
_LAYERS: dict[str, Callable[..., Any]] = {
    "lstm": layer_of(_lstm_cell),
    "gru": layer_of(_gru_cell),
    "rnn_tanh": layer_of(_plain_cell(torch.tanh)),
    "rnn_relu": layer_of(_plain_cell(torch.relu)),
}
RECURRENT_OPS: dict[str, Callable[..., Any]] = {
    **{f"{name}.input": layer for name, layer in _LAYERS.items()},
    **{f"{name}.data": over_packed(layer) for name, layer in _LAYERS.items()},
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
}
