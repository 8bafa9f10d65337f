"""The list of verified ops is what the recordings prove, no more and no less."""

import json
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from budgetfit.tracing.cuda.kernel_memory.registry import is_verified, verified_ops
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics
from tests.accuracy.op_level.compare import TARGET
from tests.accuracy.op_level.harvested_cases import HARVEST
from tests.accuracy.op_level.verify_ops import VERIFIED, listing, traced_ops

aten = torch.ops.aten


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="the recordings are those of torch 2.13, whose fakes are asked",
)
def test_the_list_is_what_the_recordings_prove() -> None:
    assert VERIFIED.read_text("utf-8") == listing(), (
        "run python -m tests.accuracy.op_level.verify_ops"
    )


def test_far_more_than_sixty_ops_are_proven() -> None:
    assert len(verified_ops()) >= 300
    backward = [op for op in verified_ops() if "backward" in op]
    assert len(backward) >= 30


def test_every_op_of_the_cases_traces_is_proven_or_makes_a_view() -> None:
    unproven = [op for op, state in traced_ops() if state == "UNVERIFIED"]
    assert unproven == []
    assert len(json.loads(HARVEST.read_text("utf-8"))) > 500


def test_an_op_is_verified_by_its_overload() -> None:
    assert is_verified(aten.mm.default)
    assert is_verified(aten.add.Tensor)
    assert not is_verified(aten.add.out)
    assert not is_verified(torch.ops.prims.add.default)


def covered(func: OpOverload, *args: Any) -> bool:
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = func(*args)
    return not CudaOpSemantics(TARGET).memory(func, args, {}, out).unverified


def test_long_rows_and_keys_of_16_bits_are_covered() -> None:
    short, long = torch.empty(4, 100), torch.empty(4, 5000)
    assert covered(aten.topk.default, short, 5)
    assert covered(aten.topk.default, long, 5)
    assert covered(aten.sort.default, short.half())
    assert covered(aten.cumsum.default, short.half(), 0)
