from types import SimpleNamespace
from typing import Any

import pytest
import torch

from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.workload.model_check import check_same_model
from budgetfit.workload.workload import Workload
from tests.models import EXAMPLES

HOPPER = find_gpu("h100-80gb")


def workload(name: str = "gpt2") -> Workload:
    example = EXAMPLES[name]
    found = Workload(model=example.model(), batch=example.batch, gpu=HOPPER)
    return found.with_found_blocks()


def test_the_target_is_the_card_under_the_torch_that_runs() -> None:
    target = workload().target
    assert target.compute_capability == (9, 0)
    assert target.cudnn
    major, minor = torch.__version__.split(".")[:2]
    assert target.torch_version == (int(major), int(minor))


def test_a_summary_describes_model_blocks_and_batch() -> None:
    found = workload()
    found.model.transformer.h[0].requires_grad_(requires_grad=False)
    summary = found.summary()
    parameters = list(found.model.parameters())  # the tied weight once
    assert summary.name == "GPT2LMHeadModel"
    assert summary.parameter_count == sum(p.numel() for p in parameters)
    trained = [p.numel() for p in parameters if p.requires_grad]
    assert summary.trainable_count == sum(trained) < summary.parameter_count
    assert summary.blocks == tuple(f"transformer.h.{k}" for k in range(3))
    assert summary.block_type == "GPT2Block"
    assert summary.batch == {
        "input_ids": ((2, 16), "int64"),
        "labels": ((2, 16), "int64"),
    }


def test_a_model_without_blocks_is_summed_up_too() -> None:
    plain = Workload(
        model=torch.nn.Linear(2, 2), batch=torch.zeros(2, 2), gpu=HOPPER, name="mine"
    )
    summary = plain.with_found_blocks().summary()
    assert (summary.name, summary.blocks, summary.block_type) == ("mine", (), "")


def test_blocks_under_torch_compile_are_named_by_the_module_inside() -> None:
    found = workload()
    layers = found.model.transformer.h
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer, backend="eager")
    plan: Any = SimpleNamespace(
        model=found.summary(), recipe=SimpleNamespace(wrapped_blocks=())
    )
    assert plan.model.block_type == "GPT2Block"
    check_same_model(plan, found.model)
    for index in range(len(layers)):
        layers[index] = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    with pytest.raises(InputError, match=r"has blocks of Linear, not of GPT2Block\."):
        check_same_model(plan, found.model)


def test_checkpointing_that_is_on_already_is_seen() -> None:
    found = workload()
    assert found.own_checkpointing() == ()
    found.model.transformer.h[1].gradient_checkpointing = True
    assert found.own_checkpointing() == ("transformer.h.1",)


def test_dtypes_are_named_by_their_share_and_by_what_is_trained() -> None:
    found = workload()
    assert found.dtypes() == "fp32"
    found.model.transformer.wte.to(torch.bfloat16)
    found.model.transformer.h.requires_grad_(requires_grad=False)
    # A norm of the last layer is no share worth a word.
    assert found.dtypes().startswith("fp32 frozen, ")
    assert "bf16" in found.dtypes()
