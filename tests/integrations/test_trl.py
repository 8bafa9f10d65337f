"""A plan handed to TRL's SFTTrainer is what it trains."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from torch import nn

import budgetfit
from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.integrations.exports import axolotl
from budgetfit.integrations.exports import trl as trl_module
from budgetfit.integrations.peft import attach_adapters
from budgetfit.utils.format_bytes import format_bytes
from tests.integrations.tiny_training import (
    BATCH_SIZE,
    LENGTH,
    QUIET_ARGUMENTS,
    STEPS,
    blocks_of,
    count_block_runs,
    defined_by,
    losses_of,
    make_quiet,
    mixed_segments,
    plan_for,
    runs,
    sft_texts,
    tiny_model,
    word_tokenizer,
)
from tests.processes import python

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

QUIET = {**QUIET_ARGUMENTS, "learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def no_progress_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def trained(model: nn.Module, args: object, *callbacks: Any) -> list[float]:
    trainer = trl.SFTTrainer(
        model=model,
        args=args,
        train_dataset=sft_texts(),
        processing_class=word_tokenizer(),
        callbacks=list(callbacks),
    )
    return losses_of(trainer)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_sft_recomputes_exactly_the_planned_blocks(
    precision: str, tmp_path: Path
) -> None:
    """SFTConfig switches checkpointing on for every block."""
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
    """TRL's defaults are bf16, checkpointing and a length of 1024."""
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
    names = defined_by(text)
    counts = count_block_runs(model)

    built = names["make_trainer"](model, sft_texts(), word_tokenizer())
    make_quiet(built, QUIET)
    built.train()

    assert runs(counts) == [1, 2, 2, 1]
    assert f"max_length={LENGTH}," in text


def preferences() -> Any:
    """Pairs of texts; with the prompt they are as long as was planned."""
    words = [f"w{number}" for number in range(12)]
    rows = [
        {
            "prompt": " ".join(words[row : row + 3]),
            "chosen": f" {words[row]} {words[row + 1]} {words[row + 2]}",
            "rejected": f" {words[row + 2]} {words[row + 1]}",
        }
        for row in range(9)
    ]
    return datasets.Dataset.from_list(rows * 4)


@pytest.mark.filterwarnings("ignore")  # TRL's own, of transformers' old names
@pytest.mark.parametrize(
    ("segments", "callback", "expected"),
    [([0, 2], False, [2, 1, 2, 1]), ([1, 2], True, [1, 2, 2, 1])],
)
def test_the_exported_text_makes_a_dpo_trainer_that_trains(
    segments: list[int], callback: bool, expected: list[int], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    names = blocks_of(model)
    plan = plan_for(model, tuple(Segment((names[k],)) for k in segments), batch_size=4)
    plan.save(tmp_path / "plan.json")
    plan = dataclasses.replace(plan, source=SimpleNamespace(model=model))
    text = trl_module.dpo_text(plan, str(tmp_path / "plan.json"))
    made = defined_by(text)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Training with")
        built = made["make_trainer"](model, preferences(), word_tokenizer())
        make_quiet(built, QUIET)
        counts = count_block_runs(model)  # what was said before training is known
        built.train()

    assert ("trainer_callback" in text) == callback
    assert built.args.per_device_train_batch_size == 2
    assert built.ref_model is None
    assert built.args.max_length == LENGTH
    assert runs(counts) == expected


def test_the_copy_of_the_adapter_that_trl_makes_is_told_and_no_other_setting(
    tmp_path: Path,
) -> None:
    pytest.importorskip("peft")
    base = tiny_model("llama")
    plan = budgetfit.plan(
        base, vram="1GB", method="lora", batch_size=4, max_length=LENGTH
    )
    text = trl_module.dpo_text(plan, "plan.json")
    copy = format_bytes(4 * plan.model.trainable_count)
    assert f"the frozen copy of the adapters that TRL adds and keeps ({copy})" in text
    assert "no second copy" not in text

    model = attach_adapters(base, plan.adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's, of names that transformers renames
        args = trl.DPOConfig(
            str(tmp_path), precompute_ref_log_probs=True, use_cpu=True, bf16=False
        )
        built = trl.DPOTrainer(
            model,
            args=args,
            train_dataset=preferences(),
            processing_class=word_tokenizer(),
        )
    copied = [x for name, x in built.model.named_parameters() if ".ref." in name]
    assert sum(x.nbytes for x in copied) == 4 * plan.model.trainable_count
    assert not any(x.requires_grad for x in copied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="The model has other settings")
        plan.prepare(built.model).undo()


@pytest.mark.parametrize("kind", [trl.DPOConfig, trl.RewardConfig])
@pytest.mark.parametrize("pairs", [2, 4])
def test_a_pair_counts_as_two_planned_samples(
    kind: Any, pairs: int, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    plan = plan_for(model, batch_size=4)
    given = plan.to_training_arguments(per_device_train_batch_size=pairs)
    callback = plan.trainer_callback()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        callback.on_train_begin(kind(str(tmp_path), use_cpu=True, **given), model=model)
        callback.undo()
    words = "=4, pairs of two sequences each (planned: 4 sequences)"
    assert any(words in str(each.message) for each in said) is (pairs == 4)


def test_pairs_need_an_even_number_of_planned_samples() -> None:
    plan = plan_for(tiny_model("llama"), batch_size=3)
    with pytest.raises(InputError, match="--batch-size 2"):
        trl_module.dpo_text(plan, "plan.json")
    pictures = dataclasses.replace(
        plan_for(tiny_model("llama"), batch_size=2),
        model=dataclasses.replace(
            plan.model, batch={"pixel_values": ((2, 3, 8, 8), "float32")}
        ),
    )
    with pytest.raises(InputError, match="pixel_values 3x8x8"):
        trl_module.dpo_text(pictures, "plan.json")


@pytest.mark.parametrize(
    "class_name", ["BertForMaskedLM", "T5ForConditionalGeneration"]
)
@pytest.mark.parametrize(
    "export",
    [trl_module.export_text, trl_module.dpo_text, axolotl.export_text],
    ids=["sft", "dpo", "axolotl"],
)
def test_only_causal_language_models_are_written(
    export: Callable[[Plan, str], str], class_name: str
) -> None:
    plan = plan_for(tiny_model("llama"), batch_size=2)
    model = dataclasses.replace(plan.model, class_name=class_name)
    with pytest.raises(InputError, match=f"{class_name}. Use --to trainer"):
        export(dataclasses.replace(plan, model=model), "plan.json")


@pytest.mark.parametrize(
    "class_name",
    ["", "MyOwnModel", "BertLMHeadModel", "Gemma3ForConditionalGeneration"],
)
def test_others_that_may_continue_texts_are_written(class_name: str) -> None:
    plan = plan_for(tiny_model("llama"), batch_size=2)
    model = dataclasses.replace(plan.model, class_name=class_name)
    text = trl_module.export_text(dataclasses.replace(plan, model=model), "plan.json")
    assert "SFTTrainer" in text


def test_samples_with_images_are_prepared_by_a_processor() -> None:
    plan = plan_for(tiny_model("llama"), batch_size=2)
    assert "AutoProcessor" not in trl_module.export_text(plan, "plan.json")
    batch = {**plan.model.batch, "pixel_values": ((2, 3, 8, 8), "float32")}
    seen = dataclasses.replace(plan, model=dataclasses.replace(plan.model, batch=batch))
    text = trl_module.export_text(seen, "plan.json")
    assert "processor = AutoProcessor.from_pretrained(" in text
    assert 'your own data set, with "images" and "messages"' in text
    assert "AutoTokenizer" not in text
    compile(text, "settings.py", "exec")


@pytest.mark.parametrize("name", ["_SFT", "_DPO"])
def test_the_names_that_are_written_are_fields_of_trl(name: str) -> None:
    program = getattr(trl_module, name)
    fields = {each.name for each in dataclasses.fields(getattr(trl, program.arguments))}
    plain = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    assert program.extra <= fields - plain
    assert hasattr(trl, program.trainer)
    text = trl_module.program_text(
        plan_for(tiny_model("llama"), batch_size=2), "plan.json", program
    )
    block = text[text.index(f"args = {program.arguments}(") :].split("    )\n")[0]
    written = re.findall(r"^ {8}(\w+)=", block, re.MULTILINE)
    assert {"per_device_train_batch_size", "max_length"} <= set(written) <= fields


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_text_is_written_without_trl(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_for(tiny_model("llama"), batch_size=2).save(path)
    program = (
        "import sys\n"
        "for name in ('trl', 'peft', 'datasets', 'accelerate', 'bitsandbytes'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv[1:] = sys.argv[1:]\n"
        "from budgetfit.cli.app import main\n"
        "main()\n"
    )
    words = ["export", str(path), "--to", name]
    result = python("-W", "ignore", "-c", program, *words)

    assert result.returncode == 0, result.stderr
    assert "from trl import" in result.stdout
    compile(result.stdout, "settings.py", "exec")
