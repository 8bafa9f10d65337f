"""The stand-ins for bitsandbytes' layers, without that library: what they allocate."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from budgetfit.applying.precision import apply_precision
from budgetfit.applying.quantized_layers.int8_linear import OUTLIER_COLUMNS, Int8Linear
from budgetfit.applying.quantized_layers.nf4_linear import (
    Nf4Format,
    Nf4Linear,
    nf4_tensors,
    parameter_count,
)
from budgetfit.core.precision import PRECISIONS
from budgetfit.tracing.fake.model_copy import fake_copy
from budgetfit.tracing.recording.storage_log import StorageLog

INPUTS, OUTPUTS, TOKENS = 128, 256, 2048
HALF = 2  # bytes
WEIGHT = INPUTS * OUTPUTS
IN, OUT = TOKENS * INPUTS * HALF, TOKENS * OUTPUTS * HALF


@pytest.fixture
def log() -> Iterator[StorageLog]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, StorageLog() as log:
        log.mode = mode
        yield log


def fake(layer: nn.Module, log: Any) -> nn.Module:
    copied = fake_copy(layer, log.mode)
    for tensor in (*copied.parameters(), *copied.buffers()):
        log.log_storage(tensor)
    return copied


def made_and_passing(log: StorageLog, first: int) -> tuple[list[int], list[int]]:
    """Return the sizes allocated since ``first``: those still alive, and the others."""
    died = {-event - 1 for event in log.events if event < 0}
    allocated = range(first, len(log.sizes))
    return (
        [log.sizes[i] for i in allocated if i not in died],
        [log.sizes[i] for i in allocated if i in died],
    )


def packed(**more: Any) -> Nf4Linear:
    return Nf4Linear(INPUTS, OUTPUTS, Nf4Format(**more), None)


def test_a_packed_weight_is_half_a_byte_a_number_and_its_scales() -> None:
    sizes = {n: t.nbytes for n, t in nf4_tensors(1000, Nf4Format()).items()}
    # 1000 / 2; 16 blocks of 64; one block of 256 scales.
    assert sizes == {
        "weight": 500,
        "absmax": 16,
        "nested_absmax": 4,
        "nested_code": 1024,
        "offset": 4,
        "code": 64,
    }
    flat = nf4_tensors(1001, Nf4Format(nested=False))
    assert {n: t.nbytes for n, t in flat.items()} == {
        "weight": 501,
        "absmax": 64,
        "code": 64,
    }


@pytest.mark.parametrize("nested", [True, False])
def test_a_forward_unpacks_the_weight_and_keeps_no_input(
    log: StorageLog, nested: bool
) -> None:
    layer = fake(packed(nested=nested), log)
    x = torch.empty(TOKENS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    first = len(log.sizes)
    out = layer(x)
    kept, passing = made_and_passing(log, first)
    scales = 4 * WEIGHT // 64
    assert kept == [OUT]
    # Unpacked scales, and with their mean; the weight in the input's dtype.
    assert passing == ([scales, scales] if nested else []) + [WEIGHT * HALF]
    first = len(log.sizes)
    out.backward(out)
    _, passing = made_and_passing(log, first)
    assert WEIGHT * HALF in passing
    assert x.grad is not None


def test_a_backward_unpacks_to_the_dtype_that_the_weight_had(log: StorageLog) -> None:
    layer = fake(packed(nested=False, weight=torch.float32), log)
    x = torch.empty(TOKENS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    first = len(log.sizes)
    out.backward(out)
    _, passing = made_and_passing(log, first)
    assert passing[:2] == [WEIGHT * 4, WEIGHT * HALF]


def test_inputs_take_the_compute_dtype_and_outputs_theirs(log: StorageLog) -> None:
    layer = fake(packed(compute=torch.float16), log)
    x = torch.empty(TOKENS, INPUTS, requires_grad=True)
    first = len(log.sizes)
    out = layer(x)
    assert out.dtype == torch.float32
    kept, passing = made_and_passing(log, first)
    assert kept == [2 * OUT]
    assert passing[0] == IN
    assert OUT in passing


def test_no_dtype_policy_converts_what_is_quantised() -> None:
    for layer in (packed(), Int8Linear(INPUTS, OUTPUTS, 6.0, None)):
        before = [(t.dtype, t.nbytes) for t in (*layer.parameters(), *layer.buffers())]
        apply_precision(layer, PRECISIONS["bf16"], "cpu")
        after = [(t.dtype, t.nbytes) for t in (*layer.parameters(), *layer.buffers())]
        assert after == before


def test_int8_multiplies_bytes_and_keeps_its_input(log: StorageLog) -> None:
    layer = fake(Int8Linear(INPUTS, OUTPUTS, 6.0, None), log)
    x = torch.empty(1, TOKENS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    first = len(log.sizes)
    out = layer(x)
    kept, passing = made_and_passing(log, first)
    # The output with its outliers added, and the outliers themselves.
    assert sorted(kept) == sorted([TOKENS * OUTLIER_COLUMNS * HALF, OUT])
    # fp16 copy, scales of rows, bytes; the product in int32, in fp16 and as asked for.
    for size in (IN, TOKENS * 4, IN // 2, OUT * 2, OUT):
        assert size in passing
    first = len(log.sizes)
    out.backward(out)
    _, passing = made_and_passing(log, first)
    assert WEIGHT * HALF in passing


def test_int8_of_odd_widths_multiplies_in_fp32(log: StorageLog) -> None:
    layer = fake(Int8Linear(6, OUTPUTS, 0.0, None), log)
    x = torch.empty(TOKENS, 6, dtype=torch.float16, requires_grad=True)
    first = len(log.sizes)
    layer(x)
    _, passing = made_and_passing(log, first)
    assert TOKENS * 6 * 4 in passing


def test_packed_numbers_are_counted_unpacked() -> None:
    bias = nn.Parameter(torch.zeros(OUTPUTS))
    layer = Nf4Linear(INPUTS, OUTPUTS, Nf4Format(), bias)
    model = nn.Sequential(layer, nn.Linear(4, 4))
    assert parameter_count(model) == WEIGHT + OUTPUTS + 20
