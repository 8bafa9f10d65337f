"""The list of verified ops is what the recordings prove, no more and no less."""

import json
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from budgetfit.tracing.cuda.kernel_memory.registry import is_verified, verified_ops
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics
from tests.accuracy.op_level.compare import TARGET, recording
from tests.accuracy.op_level.harvested_cases import HARVEST
from tests.accuracy.op_level.op_call import op_named
from tests.accuracy.op_level.op_families import ODD
from tests.accuracy.op_level.record_ops import RECORDINGS
from tests.accuracy.op_level.verify_ops import (
    VERIFIED,
    full_name,
    listing,
    proofs,
    traced_ops,
)

aten = torch.ops.aten


def test_every_recorded_call_is_predicted_to_the_byte_and_the_list_says_so() -> None:
    found = proofs()
    assert not [proof.example for proof in found.values() if proof.wrong]
    if torch.__version__.startswith("2.13."):  # of which the recordings are
        assert VERIFIED.read_text("utf-8") == listing(found), (
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


def test_an_op_is_on_the_list_only_if_its_odd_calls_are_right() -> None:
    odd = {full_name(case[0]) for family in ODD for case in cases_of(family)}
    allocating = {op for op in verified_ops() if not op_named(op).is_view}
    makers = ("zeros", "ones", "rand", "full", "arange", "linspace", "eye", "scalar_te")
    assert not {op for op in allocating - odd if not op.startswith((*makers, "empty"))}
    assert sum(len(cases_of(family)) for family in ODD) > 10_000


def cases_of(family: str) -> list[Any]:
    return list(recording(RECORDINGS / f"{family}.json")["cases"])


def covered(func: OpOverload, *args: Any) -> bool:
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = func(*args)
    return not CudaOpSemantics(TARGET).memory(func, args, {}, out).unverified


def test_calls_that_the_rules_of_a_verified_op_do_not_cover_are_not_verified() -> None:
    short, long = torch.empty(4, 100), torch.empty(4, 50_000)
    assert covered(aten.topk.default, long, 5)
    assert covered(aten.sort.default, long.half())
    assert covered(aten.cumsum.default, short.half(), 0)
    assert covered(aten.mse_loss_backward.default, torch.empty(()), short, short, 1)
    half = short.half()
    assert not covered(aten.mse_loss_backward.default, torch.empty(()), short, half, 1)
    assert covered(aten.histc.default, short, 8, 0, 7)
    assert not covered(aten.histc.default, short, 8)
    volume, weight = torch.empty(2, 3, 4, 4, 4), [torch.empty(3)] * 4
    rest = *weight, True, 0.1, 1e-5
    assert covered(aten.native_batch_norm.default, volume, *rest)
    last = volume.to(memory_format=torch.channels_last_3d)
    assert covered(aten.native_batch_norm.default, last, *rest)
