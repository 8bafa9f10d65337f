"""budgetfit.apply: the model trains by the plan, and can be put back."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import ParamsT
from transformers import GPT2Config, GPT2LMHeadModel, SwinConfig

import budgetfit
from budgetfit import InputError, Plan
from budgetfit.applying.attention_implementation import describe_attention
from tests.api.planned import CARD, Fingerprint
from tests.models import alone

STEPS = 4


class Tower(nn.Module):
    """A plain module; its blocks are in a ModuleList, and it returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower().train()


def batch(samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(samples, 8, generator=generator),
        "y": torch.randint(0, 2, (samples,), generator=generator),
    }


def cross_entropy(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch["y"])


def fast_sgd(parameters: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def plan_of(model: nn.Module, **options: Any) -> Plan:
    settings: dict[str, Any] = {
        "gpu": CARD,
        "batch": batch(),
        "loss": cross_entropy,
        "precision": "fp32",
        "optimizer": fast_sgd,
        "batch_size": 4,
        "effective_batch_size": 8,
        "checkpointing": "full",
        **options,
    }
    return budgetfit.plan(model, **settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    alone(plan_of(tower())).save(path)
    return path


def train(run: budgetfit.Run, steps: int = STEPS) -> list[float]:
    torch.manual_seed(5)
    return [run.step(batch()).item() for _ in range(2 * steps)]


def test_the_model_that_was_planned_trains_and_is_put_back() -> None:
    model = tower()
    plan = plan_of(model)
    before = Fingerprint.of(model)
    run = budgetfit.apply(plan)
    assert run.model is model
    assert run.recipe == plan.recipe
    losses = train(run)
    run.undo()
    assert losses[-1] < losses[0]
    after = Fingerprint.of(model)
    for name in ("objects", "modules", "gradients"):
        assert getattr(after, name) == getattr(before, name), name
    assert not after.tensors["head.weight"].equal(before.tensors["head.weight"])


def test_a_loaded_plan_trains_as_the_one_that_was_saved(saved: Path) -> None:
    first, second = tower(), tower()
    with budgetfit.apply(plan_of(first)) as run:
        expected = train(run)
    loaded = Plan.load(saved)
    with budgetfit.apply(loaded, second, loss=cross_entropy, optimizer=fast_sgd) as run:
        assert train(run) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"Hand one in: budgetfit\.apply"),
        ({"model": True, "optimizer": fast_sgd}, r"made with loss=\S+cross_entropy"),
        ({"model": True, "loss": cross_entropy}, r"made with optimizer=\S+fast_sgd"),
        (
            {"model": True, "loss": cross_entropy, "optimizer": torch.optim.Adam},
            "Hand in the same one",
        ),
    ],
)
def test_a_loaded_plan_needs_its_model_loss_and_optimizer_again(
    saved: Path, given: dict[str, Any], message: str
) -> None:
    handed_in = {**given, "model": tower()} if given else {}
    with pytest.raises(InputError, match=message):
        budgetfit.apply(Plan.load(saved), **handed_in)


def test_the_learning_rate_is_given_or_transformers_default(saved: Path) -> None:
    model = tower()
    plan = plan_of(model, loss=cross_entropy, batch=batch(), optimizer="adamw_torch")
    with budgetfit.apply(plan, model) as run:
        assert run.optimizer.param_groups[0]["lr"] == 5e-5
    with budgetfit.apply(plan, model, learning_rate=0.5) as run:
        assert run.optimizer.param_groups[0]["lr"] == 0.5
    wrong: Any
    for wrong in (0, -1.0, float("nan"), "fast"):
        with pytest.raises(InputError, match="learning_rate must be a number above 0"):
            budgetfit.apply(plan, model, learning_rate=wrong)
    own: dict[str, Any] = {"loss": cross_entropy, "optimizer": fast_sgd}
    with pytest.raises(InputError, match=r"a function, .*fast_sgd.* sets its own"):
        budgetfit.apply(Plan.load(saved), tower(), learning_rate=0.1, **own)


def test_another_model_than_the_planned_one_is_refused(saved: Path) -> None:
    other = tower()
    other.head = nn.Linear(8, 3)
    renamed = tower()
    renamed.layers = renamed.blocks
    del renamed.blocks
    before = Fingerprint.of(other)
    with pytest.raises(InputError, match="this model has 243 parameters, not 234"):
        budgetfit.apply(Plan.load(saved), other)
    with pytest.raises(InputError, match=r"has no block 'blocks\.0'"):
        budgetfit.apply(Plan.load(saved), renamed)
    Fingerprint.of(other).assert_equal(before)


def test_a_model_that_trains_other_parameters_is_refused(saved: Path) -> None:
    frozen = tower()
    frozen.blocks.requires_grad_(requires_grad=False)
    names = r"frozen here: blocks\.0\S+, \S+, \S+ and \d more\. Use requires_grad_"
    with pytest.raises(InputError, match=f"trains 18 parameters, not 234; {names}"):
        budgetfit.apply(Plan.load(saved), frozen)


def test_a_model_with_other_attention_is_refused() -> None:
    def of(heads: int, kind: str) -> nn.Module:
        config = GPT2Config(
            vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=heads
        )
        return GPT2LMHeadModel._from_config(config, attn_implementation=kind)

    plan = budgetfit.plan(of(2, "sdpa"), gpu=CARD, batch_size=2)
    assert plan.model.attention == "sdpa, 2 heads, 2 of keys"
    for heads, kind, found in (
        (2, "eager", "attention eager, 2 heads, 2 of keys, not sdpa, 2 heads"),
        (4, "sdpa", "attention sdpa, 4 heads, 4 of keys, not sdpa, 2 heads"),
    ):
        with pytest.raises(InputError, match=found):
            budgetfit.apply(plan, of(heads, kind))
    budgetfit.apply(plan, of(2, "sdpa")).undo()


def test_heads_that_differ_by_layer_are_all_named() -> None:
    class PerLayer:
        """A config that has no count of heads of its own."""

        per_layer_config = tuple(
            SimpleNamespace(num_attention_heads=heads, num_key_value_heads=2)
            for heads in (2, 8, 2)
        )
        _attn_implementation = "sdpa"

        def __getattr__(self, name: str) -> int:
            raise RuntimeError(name)

        def to_dict(self) -> dict[str, int]:
            return {}

    model: Any = nn.Linear(1, 1)
    model.config = PerLayer()
    assert describe_attention(model) == "sdpa, 2 or 8 heads, 2 of keys"


def test_heads_of_the_stages_of_a_backbone_are_told() -> None:
    model: Any = nn.Linear(1, 1)
    model.config = SwinConfig(num_heads=[1, 2, 2])
    told = "sdpa, 1 or 2 heads, 1 or 2 of keys"
    assert describe_attention(model) == told


def test_what_is_no_plan_or_no_model_is_refused(saved: Path) -> None:
    with pytest.raises(InputError, match="A Plan is expected, not a str"):
        budgetfit.apply(str(saved))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, not a str"):
        budgetfit.apply(Plan.load(saved), "gpt2")  # type: ignore[arg-type]


def test_a_model_on_meta_has_nothing_to_train() -> None:
    model = tower().to("meta")
    plan = plan_of(model, effective_batch_size=None)
    with pytest.raises(InputError, match="on the meta device"):
        budgetfit.apply(plan)
    with budgetfit.apply(plan, tower()) as run:
        assert train(run, 1)


def test_a_compiled_model_is_planned_and_trained_in_eager_mode() -> None:
    model = tower()
    compiled = torch.compile(model, backend="eager")
    plan = plan_of(compiled)
    assert plan.recipe.wrapped_blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert any("is under torch.compile" in note for note in plan.warnings)
    with budgetfit.apply(plan) as run:
        assert run.model is model
    with pytest.warns(UserWarning, match=r"run\.model is the model without"):
        run = budgetfit.apply(plan, compiled)
    assert run.model is model


def test_out_of_memory_is_reported_with_the_plans_numbers_and_what_should_fit() -> None:
    plan = plan_of(tower())
    with budgetfit.apply(plan) as run:

        def full(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        handle = run.model.blocks[1].register_forward_hook(full)
        with pytest.raises(budgetfit.BudgetfitError, match="in the forward of b") as e:
            run.step(batch())
        handle.remove()
        assert "predicted " in str(e.value)
        assert isinstance(e.value, torch.OutOfMemoryError)
        error: Any = e.value
        smaller = error.recipe
        assert smaller.effective_batch_size == plan.recipe.effective_batch_size
        run.adopt(smaller)
        for part in run.parts(batch(8)):
            run.step(part)
        assert run.updated
