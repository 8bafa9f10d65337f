"""Recurrent layers as CUDA runs them: torch's own results, step by step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from budgetfit.tracing.cuda.dispatch.recurrent_layers import CUDNN_NOTE, RECURRENT_OPS
from budgetfit.tracing.cuda.op_semantics import imitate_cuda
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.values.known_values import KnownValues

TARGET = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13), cudnn=False)
LAYOUTS = [
    {"num_layers": 1},
    {"num_layers": 2, "batch_first": True},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 1, "bias": False},
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_plain_layer_computes_what_torch_does(
    layout: dict[str, int], packed: bool
) -> None:
    layer = nn.RNN(6, 4, **layout)
    x: Any = torch.randn(3, 5, 6)
    batch = x.shape[0 if layer.batch_first else 1]
    if packed:
        x, batch = pack_padded_sequence(torch.randn(5, 3, 6), [5, 3, 3]), 3
    state = torch.zeros(layer.num_layers * (1 + layer.bidirectional), batch, 4)
    expected, last = layer(x)
    out, own = RECURRENT_OPS["rnn_tanh.data" if packed else "rnn_tanh.input"](
        *((x.data, x.batch_sizes) if packed else (x,)),
        state,
        list(layer.parameters()),
        layer.bias,
        layer.num_layers,
        0.0,
        False,
        layer.bidirectional,
        *(() if packed else (layer.batch_first,)),
    )
    torch.testing.assert_close(out, expected.data)
    torch.testing.assert_close(own, last)


class Packed(nn.Module):
    """The layer over samples of equal lengths."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, [len(x)] * x.shape[1])
        return self.layer(packed)[0].data


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_equal_samples_take_what_plain_ones_do(kind: type[nn.Module]) -> None:
    _, plain = traced(kind(64, 64, 2))
    _, packed = traced(Packed(kind(64, 64, 2)))
    most = max(plain)  # the gates or the workspace of a step
    assert packed.count(most) >= plain.count(most) > 0


def traced(layer: nn.Module, *shape: int) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of the output and what a step asks of the allocator."""
    shape = shape or (4, 3, 64)
    with fake_mode() as mode:
        copied = fake_copy(layer, mode)
        semantics, imitation = imitate_cuda(TARGET)
        log = StorageLog(semantics, KnownValues().run)
        with imitation, log:
            x = torch.empty(shape, requires_grad=True)
            for parameter in copied.parameters():
                log.log_storage(parameter)
            first = len(log.sizes)
            out = copied(x)
            out = out[0] if isinstance(out, tuple) else out
            last = len(log.sizes)
            out.sum().backward()
    return tuple(out.shape), log.sizes[first:last]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layers_with_fused_cells_have_torchs_shapes(
    kind: type[nn.Module], layout: dict[str, int]
) -> None:
    layer = kind(64, 64, **layout)
    shape, _ = traced(layer)
    assert shape == tuple(layer(torch.empty(4, 3, 64))[0].shape)


def test_an_lstm_saves_the_gates_of_every_step() -> None:
    _, sizes = traced(nn.LSTM(64, 64, 1, batch_first=True))
    # 4 samples of 64 states in fp32, 4 gates; a step: both products, the workspace, the
    # state and the cell. In the end the outputs of 3 steps and both last states.
    state, gates = 4 * 64 * 4, 4 * 64 * 4 * 4
    step = [gates, gates, gates, state, state]
    made = [size for size in sizes[sizes.index(gates) :] if size]
    assert made == step * 3 + [3 * state, state, state]


def test_a_projection_makes_states_smaller() -> None:
    layer = nn.LSTM(64, 64, 1, proj_size=16)
    assert traced(layer)[0] == (4, 3, 16)


@pytest.mark.parametrize("bias", [True, False])
def test_a_single_cell_is_a_step_of_a_layer(bias: bool) -> None:
    # 4 samples of 64 states in fp32, as above. A GRU has 3 gates and a workspace of 5.
    state = 4 * 64 * 4
    shape, sizes = traced(nn.LSTMCell(64, 64, bias=bias), 4, 64)
    assert shape == (4, 64)
    made = [size for size in sizes if size]
    assert made[-5:] == [4 * state, 4 * state, 4 * state, state, state]
    shape, sizes = traced(nn.GRUCell(64, 64, bias=bias), 4, 64)
    assert shape == (4, 64)
    made = [size for size in sizes if size]
    assert made[-4:] == [3 * state, 3 * state, 5 * state, state]


@pytest.mark.parametrize(
    ("layer", "in_cudnn"),
    [(nn.LSTM(8, 8), True), (nn.GRU(8, 8), True), (nn.LSTMCell(8, 8), False)],
    ids=["LSTM", "GRU", "LSTMCell"],
)
def test_only_layers_run_in_cudnn(layer: nn.Module, in_cudnn: bool) -> None:
    with fake_mode() as mode:
        copied = fake_copy(layer, mode)
        semantics, imitation = imitate_cuda(replace(TARGET, cudnn=True))
        assert semantics is not None
        with imitation, StorageLog(semantics, KnownValues().run):
            copied(torch.empty(4, 8))
    assert [note for note in semantics.notes if "recurrent layers" in note] == [
        CUDNN_NOTE
    ] * in_cudnn
