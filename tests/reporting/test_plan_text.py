"""The plan as a user reads it."""

import dataclasses
import io
import json
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from budgetfit.api.how_many_gpus import _per_money
from budgetfit.core.adapter import Adapter
from budgetfit.core.budget import Budget
from budgetfit.core.plan import NO_LOSS, Alternative, LazyAlternatives, Plan
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.gpus.cuda_context import CudaContext, measured_context
from budgetfit.gpus.table import find_gpu, generic_gpu
from budgetfit.integrations.exports.trainer import export_text as trainer_text
from budgetfit.integrations.source_code.plain_torch import torch_script
from budgetfit.reporting.json import plan_json
from budgetfit.reporting.render import plan_text, print_plan, render, show
from tests.reporting.sample_plans import (
    GIB,
    MIB,
    sample_estimate,
    sample_gpu,
    sample_lengths,
    sample_model,
    sample_plan,
    sample_recipe,
    singles,
)


def line_with(text: str, words: str) -> str:
    """The one line that has these words."""
    (found,) = [line for line in text.splitlines() if words in line]
    return found


def test_the_header_names_the_blocks_of_all_towers() -> None:
    kinds = ("CLIPEncoderLayer", "LlamaDecoderLayer")
    model = sample_model(block_type=kinds[1], block_types=kinds)
    header = " ".join(render(plan_text(sample_plan(model=model))).split())
    assert "in 24 blocks of CLIPEncoderLayer, LlamaDecoderLayer One sample" in header


def test_a_plan_in_a_console_is_one_short_line() -> None:
    plan = sample_plan()
    shown = repr(plan)
    assert len(shown) < 300
    assert "\n" not in shown
    assert plan.model.name in shown
    assert f"batch_size {plan.recipe.batch_size}, " in shown
    assert repr(plan.estimate) in shown


def test_the_answer_comes_before_the_reasons() -> None:
    text = str(sample_plan())
    order = ["RECOMMENDED", "WATCH OUT", "NEXT", "--details"]
    assert sorted(order, key=text.index) == order
    text = sample_plan().details()
    order = ["RECOMMENDED", "WHERE IT GOES", "ALTERNATIVES", "WATCH OUT", "NEXT"]
    assert sorted(order, key=text.index) == order


@pytest.mark.parametrize(
    ("changes", "export"),
    [
        ({}, "torch"),
        ({"loss_chunks": 8}, "trainer"),
        ({"segments": (Segment(("layers.0",), "offload"),)}, "trainer"),
        ({"optimizer_in_backward": True, "gradient_accumulation_steps": 1}, "trainer"),
    ],
)
def test_next_names_an_export_that_can_be_written(
    changes: dict[str, Any], export: str
) -> None:
    recipe = sample_recipe(**changes)
    plan = sample_plan(recipe=recipe, estimate=sample_estimate(recipe))
    text = render(plan_text(plan, saved_as="plan.json"))
    assert f"budgetfit export plan.json --to {export} > train.py" in text
    exports = {"torch": torch_script, "trainer": partial(trainer_text, plan_file="")}
    assert exports[export](plan)
    if export != "torch":
        with pytest.raises(InputError, match="export --to trainer"):
            torch_script(plan)


def test_next_of_a_nested_batch_is_no_script_of_torch_alone() -> None:
    """Its loop moves a dictionary or tuple of tensors to the card."""
    batch = {
        "pixel_values": ((2, 3, 64, 64), "float32"),
        "labels.0.boxes": ((7, 4), "float32"),
        "labels.1.boxes": ((7, 4), "float32"),
    }
    plan = sample_plan(model=sample_model(batch=batch))
    text = render(plan_text(plan, saved_as="plan.json"))
    assert "budgetfit export plan.json --to trainer > train.py" in text
    assert trainer_text(plan, plan_file="")
    with pytest.raises(InputError, match=r"inside, such as labels\.0\.boxes"):
        torch_script(plan)


def test_next_quotes_paths_and_asks_for_the_loss_that_is_missing() -> None:
    plan = sample_plan()
    text = render(plan_text(plan, saved_as="out dir/p.json"))
    assert "budgetfit verify 'out dir/p.json'   #" in text
    assert "budgetfit export 'out dir/p.json' --to" in text
    without = dataclasses.replace(plan.estimate, notes=(NO_LOSS,))
    plan = sample_plan(estimate=without)
    text = render(plan_text(plan, saved_as="p.json"))
    assert "budgetfit verify p.json --loss FILE.py:FUNCTION   #" in text
    assert "budgetfit.verify(plan, loss=loss)" in render(plan_text(plan))
    asked = {"model": "my model.py:build", "loss": "mine.py:loss"}
    own = sample_plan(provenance={"asked": asked})
    text = render(plan_text(own, saved_as="p.json"))
    assert "verify p.json --model 'my model.py:build' --loss mine.py:loss   #" in text
    asked: dict[str, object] = {"model": "mine.py:build", "loss": "mine.loss"}
    asked["loss_of_factory"] = True
    own = sample_plan(provenance={"asked": asked})
    text = render(plan_text(own, saved_as="p.json"))
    assert "budgetfit verify p.json --model mine.py:build   #" in text
    asked = {"model": "mine.py:build", "loss": None}
    own = sample_plan(estimate=without, provenance={"asked": asked})
    text = render(plan_text(own, saved_as="p.json"))
    assert "p.json --model mine.py:build --loss FILE.py:FUNCTION   #" in text
    assert "budgetfit.verify(plan)" in render(plan_text(sample_plan()))


def test_next_names_the_code_of_a_plan_for_a_config() -> None:
    asked = {"model": "gpt2", "loss": "mine.py:loss", "batch": "mine.py:batch"}
    own = sample_plan(provenance={"asked": {**asked, "trust_remote_code": True}})
    text = render(plan_text(own, saved_as="p.json"))
    options = "--loss mine.py:loss --batch mine.py:batch --trust-remote-code"
    assert f"budgetfit verify p.json {options}   #" in text
    handed_in = sample_plan(
        provenance={"asked": {"model": "gpt2", "loss": "mine.loss"}}
    )
    assert "verify p.json   #" in render(plan_text(handed_in, saved_as="p.json"))


def test_next_names_a_library_that_has_adapters() -> None:
    plan = sample_plan(adapter=Adapter(method="lora"))
    assert "--to trainer > train.py" in render(plan_text(plan, saved_as="plan.json"))


def test_the_first_text_compares_with_what_is_usual_and_evaluates_nothing() -> None:
    kept = Alternative(
        label="everything kept",
        estimate=sample_estimate(sample_recipe(segments=()), fits=False),
        fits=False,
    )

    def evaluate() -> tuple[Alternative, ...]:
        pytest.fail("the other alternatives were evaluated")

    lazy = LazyAlternatives(known=(kept,), evaluate=evaluate)
    text = str(sample_plan(alternatives=(), lazy_alternatives=lazy))
    assert "COMPARED WITH USUAL SETTINGS" in text
    assert line_with(text, "gradient checkpointing off").endswith("too much")


def test_a_notebook_prints_the_same_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = sample_plan()
    expected = str(plan)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(plan) == expected
    print_plan(plan)
    assert capsys.readouterr().out == expected + "\n"


def test_the_settings_are_named_as_other_libraries_name_them() -> None:
    text = str(sample_plan())
    assert (
        "batch_size 6   gradient_accumulation_steps 11   (effective batch size 66)"
        in text
    )
    assert "precision bf16-mixed   optimizer adamw_torch_fused" in text
    assert (
        "recompute blocks 0-15 (16 of 24); keep all activations of blocks 16-23" in text
    )


def test_the_reserved_peak_stands_beside_what_is_usable() -> None:
    # 24 GiB - 512 MiB context - 512 MiB headroom = 23 GiB
    heading = line_with(str(sample_plan()), "RECOMMENDED")
    assert heading.endswith(
        "reserved 22.00 GiB of 23.00 GiB usable   FITS, 1.00 GiB left"
    )


def test_a_plan_that_does_not_fit_says_so() -> None:
    estimate = sample_estimate(fits=False)
    above = dataclasses.replace(estimate, reserved_bytes=47 * GIB // 2)
    for shown, end in ((estimate, "DOES NOT FIT"), (above, "NOT FIT, 512 MiB over")):
        heading = line_with(str(sample_plan(estimate=shown)), "RECOMMENDED")
        assert heading.endswith(end)


def test_allocated_reserved_and_process_are_three_named_numbers() -> None:
    # process = 22 GiB reserved + 512 MiB context
    peaks = line_with(str(sample_plan()), "peak allocated 20.00 GiB")
    assert "reserved 22.00 GiB   process 22.50 GiB" in peaks


def test_the_parts_at_the_peak_add_up_to_the_process() -> None:
    text = sample_plan().details()
    part = text[text.index("WHERE IT GOES") : text.index("largest layers")]
    rows = part.splitlines()[1:-1]
    sizes = [
        float(number) / (1024 if unit == "MiB" else 1)
        for row in rows
        for number, unit in [row.split("  #")[0].rsplit(maxsplit=2)[-2:]]
    ]
    *parts, process = sizes
    assert sum(parts) == process == 22.5


def test_the_largest_part_has_the_longest_bar_and_zero_has_none() -> None:
    text = sample_plan().details()
    assert "gradients" not in text
    bars = [
        line_with(text, f"  {name} ").count("#")
        for name in ("parameters", "CUDA context")
    ]
    # 32 columns * 10 GiB / 22.5 GiB = 14, 32 * 0.5 / 22.5 = 1
    assert bars == [14, 1]


def test_rates_of_rows_are_those_of_the_longest_samples() -> None:
    said = "samples/s: of the longest samples alone"
    varying = sample_plan(varying_lengths=sample_lengths())
    assert said in varying.details()
    assert said not in sample_plan().details()


def test_hours_and_prices_are_of_the_rate_over_all_lengths() -> None:
    plain, plan = sample_plan(), sample_plan(varying_lengths=sample_lengths())
    assert plain.hours(7200) == pytest.approx(plain.estimate.hours(7200))
    assert plan.hours(720_000) == pytest.approx(2.0)
    assert json.loads(plan_json(plan, 720_000))["hours"] == pytest.approx(2.0)
    assert _per_money(plan, 2.0) == pytest.approx(180_000)
    text = render(plan_text(plan, samples=720_000))
    assert line_with(text, "720,000 samples").endswith(": 2.0 h")


def test_the_moment_of_the_peak_is_named() -> None:
    assert "at the peak (backward of model.layers.15)" in sample_plan().details()


def test_the_gain_is_over_checkpointing_every_block() -> None:
    # 66 samples / 6.6 s = 10 per s, against 66 / 8.25 s = 8 per s
    text = str(sample_plan())
    assert "6,600 ms, 10 samples/s" in text
    assert "\n  25 % faster than checkpointing every block" in text


def test_without_a_judged_full_checkpointing_no_gain_is_claimed() -> None:
    assert "than checkpointing" not in str(sample_plan(alternatives=()))


def test_the_same_steps_in_another_order_gain_nothing() -> None:
    recipe = sample_recipe(segments=singles(range(24)))
    full = Alternative(
        label="every block recomputed", estimate=sample_estimate(recipe), fits=True
    )
    longest_first = sample_recipe(segments=recipe.segments, longest_batch_first=True)
    plan = sample_plan(estimate=sample_estimate(longest_first), alternatives=(full,))
    assert "than checkpointing" not in str(plan)


def test_full_checkpointing_itself_gains_nothing_over_itself() -> None:
    every_block = sample_estimate(sample_recipe(segments=singles(range(24))))
    plan = sample_plan(estimate=every_block)
    assert "than checkpointing" not in str(plan)


def test_every_alternative_is_a_row_with_peak_speed_and_verdict() -> None:
    text = sample_plan().details()
    assert "this plan" in text
    row = line_with(text, "everything kept, batch 2").split()
    assert " ".join(row[-7:]) == "2 33 30.00 GiB 12.5 too much"


def test_warnings_and_what_is_not_modelled_are_listed() -> None:
    text = str(sample_plan())
    assert "* Labels are made up; pass batch= for your own." in text
    assert "* cuDNN is not modelled." in text


def test_it_says_that_no_gpu_was_used_and_where_the_model_is_from() -> None:
    text = str(sample_plan())
    assert "Estimate, no GPU used; from config.json, no weights loaded" in text
    assert "One sample: input_ids 2048 int64, labels 2048 int64" in text


def test_a_size_without_a_card_is_echoed_with_the_cards_of_its_class() -> None:
    total_bytes = 24 * 10**9
    plan = sample_plan(
        gpu=generic_gpu(total_bytes), budget=Budget(total_bytes, 512 * MIB, 512 * MIB)
    )
    text = str(plan)
    assert (
        "24GB = 22.35 GiB: 21.35 GiB usable\n  the CUDA context takes 512 MiB" in text
    )
    assert "Cards sold as 24 GB have 21.96 GiB (l4)" in text


def test_a_limit_below_the_card_is_told_apart_from_the_card() -> None:
    plan = sample_plan(
        gpu=find_gpu("rtx-4090"), budget=Budget(20 * 10**9, 512 * MIB, 512 * MIB)
    )
    assert "rtx-4090 23.64 GiB, limited to 20GB = 18.63 GiB: " in str(plan)


def test_frozen_parameters_are_told() -> None:
    plan = sample_plan(model=sample_model(trainable_count=41_943_040))
    assert "1.71 B parameters, 41.9 M trained, in 24 blocks" in str(plan)


def test_a_saved_plan_is_named_in_the_next_command() -> None:
    text = render(plan_text(sample_plan(), saved_as="plan.json"))
    assert "budgetfit verify plan.json" in text
    assert "budgetfit export plan.json --to torch > train.py" in text


def test_a_command_is_never_broken_over_lines() -> None:
    path = "folder/" * 20 + "plan.json"
    text = render(plan_text(sample_plan(), saved_as=path))
    assert f"  budgetfit export {path} --to torch > train.py" in text.splitlines()


@pytest.mark.parametrize(
    "plan",
    [
        sample_plan(),
        sample_plan(alternatives=(), warnings=(), provenance={}),
        sample_plan(model=sample_model(blocks=(), batch={}, source="")),
        sample_plan(warnings=("a very long warning " * 20,)),
    ],
)
def test_plain_text_is_ascii_within_80_columns(plan: Plan) -> None:
    for text in (str(plan), plan.details()):
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 80
        assert not any(line != line.rstrip() for line in text.splitlines())


def test_brackets_in_names_are_text_and_not_markup() -> None:
    plan = sample_plan(model=sample_model(name="[bold]net[/bold]"))
    assert "[bold]net[/bold]: 1.71 B" in str(plan)


def terminal(**settings: str) -> Console:
    """A colour terminal of 80 columns that is a string."""
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=80,
        color_system="standard",
        _environ=settings,
    )


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_colour_and_a_pipe_none() -> None:
    console, pipe = terminal(), Console(file=io.StringIO(), width=80)
    print_plan(sample_plan(), console, details=True)
    print_plan(sample_plan(), pipe, details=True)
    assert "\x1b[1;32mFITS" in printed(console)
    assert "\u2588" in printed(console)
    assert "\x1b" not in printed(pipe)
    assert printed(pipe) == sample_plan().details() + "\n"


def test_no_color_is_respected_on_a_terminal() -> None:
    console = terminal(NO_COLOR="1")
    show(plan_text(sample_plan()), console)
    assert "\x1b[32m" not in printed(console)
    assert "\x1b[1;32m" not in printed(console)


def test_a_warning_that_comes_twice_is_told_once() -> None:
    plan = sample_plan(warnings=("cuDNN is not modelled.",))
    assert str(plan).count("cuDNN is not modelled.") == 1


def test_the_versions_are_told_last() -> None:
    *_, versions = sample_plan().details().splitlines()
    assert versions == "budgetfit 0.1.0, torch 2.13.0, transformers 5.23.0"


def test_assumed_speeds_of_a_real_card_are_told() -> None:
    gpu = sample_gpu(rates_assumed=True, source="rates assumed: rtx-3090")
    assert "Speeds are rates assumed: rtx-3090" in str(sample_plan(gpu=gpu))


def test_the_process_and_its_context_are_ranges_where_they_are_estimates() -> None:
    context = CudaContext(
        planned_bytes=512 * MIB,
        low_bytes=331 * MIB,
        typical_bytes=451 * MIB,
        high_bytes=614 * MIB,
        source="estimated",
    )
    plan = sample_plan(
        budget=Budget(24 * GIB, 512 * MIB, 512 * MIB, context),
        estimate=sample_estimate(
            process_range_bytes=(22 * GIB + 331 * MIB, 22 * GIB + 614 * MIB)
        ),
    )
    text = str(plan)
    assert "the CUDA context takes 512 MiB (331-614 MiB), " in text
    assert "process 22.32-22.60 GiB" in text


def test_a_measured_context_is_said_to_be_one() -> None:
    context = measured_context([470 * MIB], "here")
    plan = sample_plan(budget=Budget(24 * GIB, 470 * MIB, 512 * MIB, context))
    assert "the CUDA context takes 470 MiB (measured), " in str(plan)


def test_alternatives_that_change_training_stand_apart_with_their_notes() -> None:
    changing = Alternative(
        label="with LoRA r=16",
        estimate=sample_estimate(reserved_bytes=9 * GIB),
        fits=True,
        changes_training=True,
        note="an estimate only",
    )
    plan = sample_plan(alternatives=(*sample_plan().alternatives, changing))
    text = plan.details()
    heading = text.index("changes what is trained:")
    assert text.index("everything kept") < heading < text.index("with LoRA r=16")
    assert "  with LoRA r=16: an estimate only" in text
    assert "searched for briefly" in text
    assert "searched for briefly" not in sample_plan().details()
    # The same recipe under another training is not "this plan".
    assert line_with(text, "with LoRA r=16  ").endswith("fits")


def test_an_alternative_that_is_the_plan_says_so() -> None:
    same = Alternative(label="largest batch", estimate=sample_estimate(), fits=True)
    text = sample_plan(alternatives=(same,)).details()
    assert line_with(text, "largest batch").split()[2:] == ["=", "this", "plan"]


def test_what_another_training_gains_is_no_gain_over_checkpointing_every_block() -> (
    None
):
    full, *_ = sample_plan().alternatives
    changing = dataclasses.replace(full, changes_training=True)
    plan = sample_plan(alternatives=(changing,))
    assert "than checkpointing" not in str(plan)


def test_the_answer_tells_all_that_was_decided_and_how_good_it_is() -> None:
    estimate = sample_estimate(
        sample_recipe(loss_chunks=8), host_bytes=3 * GIB, eval_batch_size=48
    )
    provenance = {"certificate": "proven optimal: within 0.1 % of the best"}
    text = str(sample_plan(estimate=estimate, provenance=provenance))
    assert "output head and loss in 8 parts" in text
    assert "pinned host memory 3.00 GiB" in text
    assert "evaluation: batch_size up to 48, with all logits at once" in text
    assert "proven optimal: within 0.1 % of the best" in " ".join(text.split())
    none_fits = dataclasses.replace(estimate, eval_batch_size=0)
    assert "evaluation: not even 1 sample fits" in str(sample_plan(estimate=none_fits))
