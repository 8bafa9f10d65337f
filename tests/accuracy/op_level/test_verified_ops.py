"""The list of verified ops is what the recordings prove, no more and no less."""

from __future__ import annotations

import json

import torch

from budgetfit.tracing.cuda_semantics.verified_ops import is_verified, verified_ops
from tests.accuracy.op_level.harvested_cases import HARVEST
from tests.accuracy.op_level.verify_ops import VERIFIED, listing, traced_ops

aten = torch.ops.aten


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
