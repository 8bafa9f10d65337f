"""Errors are told in the options of the command line, where there are any."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from click.testing import Result

from budgetfit.cli import error_wording
from budgetfit.cli.app import app
from budgetfit.cli.error_wording import plan_with_option_names, with_option_names
from budgetfit.core.plan import LazyAlternatives
from budgetfit.errors import DoesNotFitError, InputError, Suggestion
from tests.cli.fake_api import FakeApi
from tests.reporting.sample_plans import (
    sample_cards,
    sample_estimate,
    sample_model,
    sample_plan,
)


def test_options_are_those_that_typer_makes() -> None:
    made = {
        each.name: ("".join(each.opts[:1]), "".join(each.secondary_opts[:1]))
        for command in vars(typer.main.get_command(app))["commands"].values()
        for each in command.params
        if any(word.startswith("--") for word in (*each.opts, *each.secondary_opts))
    }
    assert error_wording._options() == made


@pytest.mark.parametrize(
    ("python", "options"),
    [
        ("vram= takes a size instead", "--vram takes a size instead"),
        ("leave max_length= out.", "leave --max-length out."),
        ("max_length=512, or less", "--max-length 512, or less"),
        ('Use optimizer="sgd".', "Use --optimizer sgd."),
        ("precision='bf16' needs", "--precision bf16 needs"),
        ('gpu="RTX 4090"', "--gpu 'RTX 4090'"),
        ('precision=["fp32", "bf16"] is', "--precision fp32,bf16 is"),
        ("(prepare_for_kbit=False)", "(--no-prepare-for-kbit)"),
        ("trust_remote_code=True.", "--trust-remote-code."),
        ("lora_r=8 or vram=...", "--lora-r 8 or --vram ..."),
    ],
)
def test_arguments_become_options(python: str, options: str) -> None:
    assert with_option_names(python) == options


@pytest.mark.parametrize(
    "text",
    [
        'vram="24GB" (--vram 24GB)',
        "(prepare_for_kbit=False, --no-prepare-for-kbit)",
        "batch={...} and no_option=3",
        "loss=lambda outputs, batch: outputs.mean()",
        "double_quantization=True",
        'plan(model, vram="24GB")',
        'budgetfit.estimate(model, Recipe(optimizer="sgd"), gpu="t4")',
        "objective batch_size, a==b, x = y",
    ],
)
def test_what_has_no_option_or_is_python_stays_as_it_is(text: str) -> None:
    assert with_option_names(text) == text


def test_alternatives_of_a_printed_plan_name_options() -> None:
    note = 'optimizer="adamw_bnb_8bit"'
    row = dataclasses.replace(sample_plan().alternatives[0], note=note)
    evaluated = sample_plan(alternatives=(row,))
    lazy = LazyAlternatives(known=(row,), evaluate=lambda: (row,))
    for plan in (evaluated, sample_plan(lazy_alternatives=lazy)):
        shown = plan_with_option_names(plan)
        assert shown.judged_alternatives[0].note == "--optimizer adamw_bnb_8bit"
        assert shown.alternatives[0].note == "--optimizer adamw_bnb_8bit"
        assert plan.alternatives[0].note == note  # what is saved


def test_a_line_that_names_an_option_leaves_the_arguments_of_others_to_be_told() -> (
    None
):
    text = "  --gpu l4 instead of --vram: peak 17 GiB\nNote: name yours with gpu=."
    assert with_option_names(text).endswith("Note: name yours with --gpu.")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InputError("Use max_length=16."), "Error: Use --max-length 16."),
        (
            DoesNotFitError(
                needed_bytes=2,
                usable_bytes=1,
                largest=("activations", 1),
                suggestions=(
                    Suggestion(
                        arguments={"optimizer": "adamw_bnb_8bit"},
                        recipe=None,
                        peak_bytes=1,
                    ),
                ),
            ),
            "  --optimizer adamw_bnb_8bit: peak",
        ),
    ],
)
def test_an_error_is_told_so(
    run: Callable[..., Result], api: FakeApi, error: Exception, told: str
) -> None:
    api.error = error
    assert told in run("plan", "gpt2").output


def test_remarks_are_told_in_options_too(
    run: Callable[..., Result], api: FakeApi, tmp_path: Path
) -> None:
    note = "text rows of 8 tokens; max_length= changes it"
    rows = (dataclasses.replace(sample_cards()[0], warnings=(note,)),)
    found = sample_estimate(notes=(note,))
    api.answers["plan"] = sample_plan(warnings=(note,))
    api.answers["estimate_settings"] = (found, sample_model())
    api.answers["compare"] = (rows, sample_model())
    api.answers["check"] = found
    saved = tmp_path / "plan.json"
    for words in (
        ("plan", "gpt2", "--vram", "24GB", "--save", saved),
        ("show", saved),
        ("check", saved),
        ("estimate", "gpt2"),
        ("compare", "gpt2", "--gpus", "t4"),
    ):
        assert "tokens; --max-length changes it" in run(*words).stdout
    assert note in json.loads(run("show", saved, "--json").stdout)["warnings"]
