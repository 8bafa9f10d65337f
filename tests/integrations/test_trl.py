"""A plan handed to TRL's SFTTrainer is what it trains."""

# ruff: noqa: ANN401 - arguments of the library

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import transformers

from budgetfit.core.recipe import Segment
from tests.integrations.tiny_training import (
    BATCH_SIZE,
    LENGTH,
    STEPS,
    blocks_of,
    count_block_runs,
    mixed_segments,
    plan_for,
    runs,
    sft_texts,
    tiny_model,
    word_tokenizer,
)

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from budgetfit.integrations import trl as trl_module  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

QUIET: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "learning_rate": 1e-3,
}


@pytest.fixture(autouse=True)
def no_progress_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def trained(model: nn.Module, args: Any, *callbacks: Any) -> list[float]:
    trainer = trl.SFTTrainer(
        model=model,
        args=args,
        train_dataset=sft_texts(),
        processing_class=word_tokenizer(),
        callbacks=list(callbacks),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_sft_recomputes_exactly_the_planned_blocks(
    precision: str, tmp_path: Path
) -> None:
    """user-needs V4: SFTConfig switches checkpointing on for every block."""
    model = tiny_model("llama")
    plan = plan_for(model, mixed_segments(model), precision=precision)
    keys = list(model.state_dict())

    def args() -> Any:
        return trl.SFTConfig(output_dir=str(tmp_path), **plan.to_sft_config(**QUIET))

    expected = trained(tiny_model("llama"), args())
    counts = count_block_runs(model)

    losses = trained(model, args(), plan.trainer_callback())

    assert runs(counts) == [2, 2, 2, 1]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert len(losses) == STEPS
    assert list(model.state_dict()) == keys


def test_the_config_answers_what_trl_would_switch_on(tmp_path: Path) -> None:
    """user-needs V4: bf16, checkpointing and a length of 1024 are TRL's defaults."""
    plan = plan_for(tiny_model("llama"))

    args = trl.SFTConfig(output_dir=str(tmp_path), **plan.to_sft_config(use_cpu=True))

    assert args.bf16 is False
    assert args.gradient_checkpointing is False
    assert args.max_length == LENGTH
    assert args.per_device_train_batch_size == BATCH_SIZE


def test_a_loss_that_trl_cuts_itself_is_left_to_it(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = plan_for(model, loss_chunks=4)
    args = trl.SFTConfig(output_dir=str(tmp_path), **plan.to_sft_config(**QUIET))
    assert not trl_module.has_fused_head(model)

    losses = trained(model, args, plan.trainer_callback())

    assert trl_module.has_fused_head(model)
    assert all(2 < loss < 6 for loss in losses)  # around ln(64) = 4.16


def test_the_exported_text_makes_an_sft_trainer_that_trains(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    plan = plan_for(model, (Segment(tuple(blocks_of(model)[1:3])),))
    plan.save(tmp_path / "plan.json")
    text = trl_module.export_text(plan, str(tmp_path / "plan.json"))
    names: dict[str, Any] = {"__name__": "settings"}
    exec(compile(text, "settings.py", "exec"), names)  # noqa: S102
    counts = count_block_runs(model)

    built = names["make_trainer"](model, sft_texts(), word_tokenizer())
    for name, value in QUIET.items():
        if name != "use_cpu":
            setattr(built.args, name, value)
    built.remove_callback(transformers.PrinterCallback)
    built.train()

    assert runs(counts) == [1, 2, 2, 1]
    assert f"max_length={LENGTH}," in text
