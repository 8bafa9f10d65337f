"""A loop of one's own around a prepared model: warned of where it is not as planned."""

import contextlib
import gc
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import budgetfit
from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES
from budgetfit.errors import InputError
from budgetfit.integrations.exports.watched_loop import other_optimizer
from tests.integrations.tiny_training import ACCUMULATION, Samples, plan_for, tiny_model


class Scaled(nn.Linear):
    """A forward of two tensors."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale


NAMED = partial(dict.fromkeys, ("x", "scale"))


@pytest.mark.parametrize(
    ("make", "batch", "call"),
    [
        (nn.Linear, lambda x: x, lambda model, batch: model(batch)),
        (Scaled, lambda x: (x, x), lambda model, batch: model(*batch)),
        (Scaled, NAMED, lambda model, batch: model(**batch)),
        (Scaled, NAMED, lambda model, batch: model(*batch.values())),
    ],
)
def test_a_batch_larger_than_planned_is_warned_of_however_the_model_is_called(
    make: Callable[..., nn.Module],
    batch: Callable[[torch.Tensor], Any],
    call: Callable[[nn.Module, Any], object],
) -> None:
    model = make(4, 4)
    planned, larger = (batch(torch.zeros(size, 4)) for size in (2, 3))
    plan = budgetfit.plan(
        model,
        gpu="t4",
        batch=planned,
        batch_size=2,
        precision="fp32",
        loss=lambda out, _: out.sum(),
    )
    with plan.prepare(model):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(model, planned)
        with pytest.warns(UserWarning, match=r"larger than the plan's: .*\[3, 4\]"):
            call(model, larger)
    assert "forward" not in vars(model)


def said_in_a_loop(
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    *,
    around: Callable[[], Any] = contextlib.nullcontext,
    micro_batches: int = ACCUMULATION,
    change: Callable[[nn.Module], object] = lambda _: None,
    left_out: int = 0,
    **recipe: Any,
) -> list[str]:
    """Train two updates of a prepared model; return the warnings.

    ``left_out``: updates that a GradScaler leaves out before the first.
    """
    model = tiny_model("llama")
    plan = plan_for(model, **recipe)
    samples = Samples()
    batch = {
        name: torch.stack([each[name] for each in samples][:3]) for name in samples[0]
    }
    with warnings.catch_warnings(record=True) as said, plan.prepare(model):
        warnings.simplefilter("always")
        change(model)
        optimizer = (make or plan.make_optimizer)(model.parameters())
        for update in range(2 + left_out):
            for _ in range(micro_batches):
                with around():
                    loss = model(**batch).loss
                loss.backward()
            if update >= left_out:
                optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in said if "planned" in str(each.message)]


BF16 = partial(torch.autocast, "cpu", torch.bfloat16)
FP16 = partial(torch.autocast, "cpu", torch.float16)
SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=0.1)


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ({}, ""),
        ({"around": BF16, "precision": "bf16-mixed"}, ""),
        ({"precision": "bf16"}, ""),
        ({"left_out": 1}, ""),
        ({"make": partial(ADAMW, foreach=True)}, ""),  # the default on CUDA
        ({"make": partial(ADAMW, foreach=False)}, "foreach=False (planned: None)"),
        ({"around": BF16}, "autocast to bf16 (planned: None)"),
        ({"precision": "bf16-mixed"}, "autocast to None (planned: bf16)"),
        (
            {"around": FP16, "precision": "bf16-mixed"},
            "autocast to fp16 (planned: bf16)",
        ),
        ({"change": nn.Module.bfloat16}, "weights in bfloat16 (planned: float32)"),
        ({"micro_batches": 1}, "gradient_accumulation_steps=1 (planned: 2)"),
        ({"micro_batches": 3}, "gradient_accumulation_steps=3 (planned: 2)"),
        ({"make": SGD}, "SGD (planned: AdamW)"),
        ({"make": partial(ADAMW, amsgrad=True)}, "amsgrad=True (planned: False)"),
        ({"make": partial(ADAMW, weight_decay=0.1)}, ""),
        (
            {"make": partial(SGD, weight_decay=0.1), "optimizer": "sgd"},
            "weight_decay=0.1 (planned: 0)",
        ),
        (
            {"make": partial(SGD, momentum=0.9), "optimizer": "sgd"},
            "momentum=0.9 (planned: 0)",
        ),
    ],
)
def test_other_settings_are_said_once(loop: dict[str, Any], said: str) -> None:
    text = f"Training with {said}: the plan's prediction is for other settings."
    assert said_in_a_loop(**loop) == ([text] if said else [])


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_the_planned_optimizer_is_said_nothing_of(name: str) -> None:
    matrix = nn.Linear(64, 64, bias=False)
    plan = plan_for(tiny_model("gpt2"), optimizer=name)
    try:
        optimizer = plan.make_optimizer(matrix.parameters())
    except InputError:
        pytest.skip("its library is not installed")
    assert other_optimizer(plan.recipe, optimizer) == []


def test_a_model_is_pickled_with_what_watches_it() -> None:
    before = hooks()
    model = tiny_model("llama")
    with plan_for(model).prepare(model):
        pickle.loads(pickle.dumps(model))
        assert hooks() != before
    assert hooks() == before


def test_a_model_that_is_gone_is_watched_no_more() -> None:
    before = hooks()
    model = tiny_model("llama")
    prepared = plan_for(model).prepare(model)
    assert hooks() != before
    del model, prepared
    gc.collect()
    assert hooks() == before


def hooks() -> set[int]:
    both = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return {key for each in both for key in each}


def test_settings_of_a_group_are_seen() -> None:
    """As the Trainer sets weight_decay."""
    recipe = plan_for(tiny_model("gpt2"), optimizer="sgd").recipe
    weights, biases = nn.Linear(4, 4).parameters()
    groups = [{"params": [weights], "weight_decay": 0.1}, {"params": [biases]}]
    found = other_optimizer(recipe, SGD(groups))
    assert found == ["weight_decay=0.1 (planned: 0)"]
