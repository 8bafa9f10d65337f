"""A plan handed to Lightning's Trainer is what it trains."""

import warnings
from typing import Any

import pytest
import torch

from budgetfit.errors import InputError
from tests.integrations.tiny_training import (
    ACCUMULATION,
    BATCH_SIZE,
    MICRO_STEPS,
    Samples,
    count_block_runs,
    defined_by,
    mixed_segments,
    plan_for,
    runs,
    tiny_model,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library's own imports
    lightning = pytest.importorskip("lightning")

from pathlib import Path

from torch import nn

from budgetfit.core.plan import Plan
from budgetfit.integrations.exports import lightning as lightning_module

pytestmark = [  # the library's own
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU"),
]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def module_of(model: nn.Module, plan: Plan) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = plan.make_optimizer(self.parameters(), 1e-3)
            return made

    return Module()


def trained(
    model: nn.Module, plan: Plan, *callbacks: Any, **options: Any
) -> list[float]:
    torch.manual_seed(0)
    arguments = {**QUIET, **plan.to_lightning_arguments(), **options}
    trainer = lightning.Trainer(callbacks=list(callbacks), **arguments)
    module = module_of(model.train(), plan)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=BATCH_SIZE)
    trainer.fit(module, loader)
    losses: list[float] = module.losses
    return losses


@pytest.mark.parametrize(
    ("kind", "precision"), [("gpt2", "fp32"), ("llama", "bf16-mixed")]
)
@pytest.mark.parametrize("loss_chunks", [1, 4])
def test_lightning_recomputes_exactly_the_planned_blocks(
    kind: str, precision: str, loss_chunks: int
) -> None:
    model = tiny_model(kind)
    plan = plan_for(
        model, mixed_segments(model), precision=precision, loss_chunks=loss_chunks
    )
    expected = trained(tiny_model(kind), plan)
    counts = count_block_runs(model)
    keys = list(model.state_dict())

    losses = trained(model, plan, plan.lightning_callback())

    assert runs(counts) == [2, 2, 2, 1]
    assert len(losses) == MICRO_STEPS
    assert losses == pytest.approx(expected, rel=1e-6 if loss_chunks == 1 else 1e-4)
    assert list(model.state_dict()) == keys
    assert "forward" not in vars(model)


def test_pure_bf16_is_set_by_the_callback() -> None:
    model = tiny_model("llama")
    plan = plan_for(model, precision="bf16")
    losses = trained(model, plan, plan.lightning_callback())
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert {each.dtype for each in model.buffers()} == {torch.float32}
    assert all(2 < loss < 6 for loss in losses)  # around ln(64) = 4.16


def test_the_plain_model_is_given_back_after_an_error() -> None:
    model = tiny_model("llama")
    plan = plan_for(model, mixed_segments(model))

    class Breaks(lightning.pytorch.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            assert any("forward" in vars(each) for each in model.modules())
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        trained(model, plan, plan.lightning_callback(), Breaks())
    assert not any("forward" in vars(each) for each in model.modules())
    assert not any(
        getattr(each, "gradient_checkpointing", False) for each in model.modules()
    )


def test_what_the_sanity_check_cached_is_freed_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else optimizer states lie in large blocks, which then cannot be freed."""
    model = tiny_model("llama")
    plan = plan_for(model)
    module = module_of(model.train(), plan)
    happened: list[str] = []
    loader = torch.utils.data.DataLoader(Samples(), batch_size=BATCH_SIZE)

    class Validates(type(module)):  # type: ignore[misc]
        def training_step(self, batch: object, index: int) -> torch.Tensor:
            happened.append("trains")
            return super().training_step(batch, index)

        def validation_step(self, *_: object) -> None:
            happened.append("validates")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("empties"))
    arguments = {**QUIET, **plan.to_lightning_arguments()}
    trainer = lightning.Trainer(callbacks=[plan.lightning_callback()], **arguments)
    module.__class__ = Validates
    trainer.fit(module, loader, loader)

    before = happened[: happened.index("trains")]
    assert before[-3:] == ["validates", "validates", "empties"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_what_compiling_cached_is_freed_before_the_first_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    plan = plan_for(model, compile="blocks")
    happened: list[str] = []
    compile_with = torch.compile

    class Notes(lightning.pytorch.Callback):
        def on_train_start(self, *_: object) -> None:
            happened.clear()  # Lightning empties it, too

        def on_before_optimizer_step(self, *_: object) -> None:
            happened.append("updates")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("empties"))
    monkeypatch.setattr(
        torch, "compile", lambda each, **_: compile_with(each, backend="eager")
    )
    trained(model, plan, plan.lightning_callback(), Notes())
    assert happened == ["empties", *["updates"] * (MICRO_STEPS // ACCUMULATION)]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("precision", "word"),
    [
        ("fp32", "32-true"),
        ("tf32", "32-true"),
        ("bf16", "32-true"),
        ("as-is", "32-true"),
        ("bf16-mixed", "bf16-mixed"),
        ("fp16-mixed", "bf16-mixed"),  # on a CPU, where Lightning has nothing else
    ],
)
def test_the_arguments_are_the_plans(precision: str, word: str) -> None:
    plan = plan_for(tiny_model("gpt2"), precision=precision)
    arguments = plan.to_lightning_arguments()
    trainer = lightning.Trainer(**{**QUIET, **arguments})
    assert trainer.precision == word
    assert arguments["precision"] in {word, "16-mixed"}
    assert trainer.accumulate_grad_batches == ACCUMULATION
    assert trainer.num_devices == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, []),
        ({"precision": "bf16-mixed"}, ["autocast to bf16 (planned: None)"]),
        (
            {"accumulate_grad_batches": 3},
            ["gradient_accumulation_steps=3 (planned: 2)"],
        ),
    ],
)
def test_other_arguments_are_said(options: dict[str, Any], said: list[str]) -> None:
    model = tiny_model("gpt2")
    plan = plan_for(model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trained(model, plan, plan.lightning_callback(), **options)
    texts = [str(each.message) for each in found]
    assert [each for each in texts if "planned" in each] == [
        f"Training with {each}: the plan's prediction is for other settings."
        for each in said
    ]


def test_another_model_is_refused() -> None:
    plan = plan_for(tiny_model("gpt2"))
    with pytest.raises(InputError, match=r"has no block 'transformer\.h\.0'"):
        trained(tiny_model("llama"), plan, plan.lightning_callback())


def test_what_is_frozen_inside_the_module_is_refused_by_name() -> None:
    """As by a callback that freezes: the module around it has other names."""
    plan, model = plan_for(tiny_model("gpt2")), tiny_model("gpt2")
    model.get_submodule("transformer.h.0").requires_grad_(requires_grad=False)
    with pytest.raises(InputError, match=r"frozen here: transformer\.h\.0"):
        trained(model, plan, plan.lightning_callback())


def test_the_exported_text_makes_a_trainer_that_trains(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = plan_for(model)
    plan.save(tmp_path / "plan.json")
    text = lightning_module.export_text(plan, str(tmp_path / "plan.json"))
    names = defined_by(text)
    counts = count_block_runs(model)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=names["BATCH_SIZE"])
    names["make_trainer"](**QUIET).fit(module_of(model.train(), plan), loader)
    assert runs(counts) == [2, 1, 2, 1]
