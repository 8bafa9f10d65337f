"""A quantised model trains and is verified on a CPU, and is as it was afterwards."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import budgetfit
from budgetfit.integrations.quantization.quantize_linear import quantize
from tests.integrations.adapters import CONFIG, QUIET, adapter, base, batch

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytestmark = QUIET
QLORA = {"batch_size": 2, "method": "qlora"}


def test_a_model_that_was_loaded_for_evaluation_is_as_before() -> None:
    model = base()
    quantize(model, adapter(method="qlora"), "cpu")
    model.eval()  # as from_pretrained leaves it; some CPUs then pack weights anew
    before = [(p, p.detach().clone(), p.requires_grad) for p in model.parameters()]
    asked: dict[str, Any] = {"gpu": "t4", "batch": batch(), **QLORA}
    plan = budgetfit.plan(model, checkpointing="full", **asked)

    check = budgetfit.verify(plan, device="cpu")

    assert check.passed
    assert check.gradients_match
    assert "bitsandbytes computes quantised layers" in check.notes[-1]
    after = list(model.parameters())
    assert all(now is then for now, (then, _, _) in zip(after, before, strict=True))
    for parameter, values, requires_grad in before:
        assert torch.equal(parameter, values)
        assert parameter.requires_grad is requires_grad
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("kind", [{}, {"quantization": "int8"}], ids=["nf4", "int8"])
def test_a_base_with_biases_trains_on(kind: dict[str, Any]) -> None:
    # They are prepared in fp32, and bitsandbytes casts them when it first needs them.
    sizes = {**CONFIG, "num_hidden_layers": 1, "attention_bias": True}
    config = LlamaConfig(**sizes)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    quantize(model, adapter(method="qlora", **kind), "cpu")
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    asked: dict[str, Any] = {"gpu": "rtx-4090", "batch": batch(), **QLORA}
    plan = budgetfit.plan(model, checkpointing="none", **asked, **kind)
    with budgetfit.apply(plan, model) as run:
        losses = [float(run.step(batch())) for _ in range(3)]
    assert losses[2] < losses[0]
    assert {name: p.dtype for name, p in model.named_parameters()} == kinds
