"""The options are frozen here, so that a new one is a visible decision."""

import pytest
import typer.main
from typer.testing import CliRunner

from budgetfit.cli.app import app

COMMON = {"--help", "-h", "--json", "--traceback"}
CARD = {"--vram", "--gpu", "--headroom", "--host-ram", "--allocator"}
GIVEN = {"--batch", "--loss"}
MODEL = {
    *("MODEL", "--max-length", "--image-size", "--text-only", "--trust-remote-code"),
    *("--batch-dims", "--frames", "--resolution"),
    *GIVEN,
}
SAMPLES = {"--samples"}
SEVERAL = {"--gpus", "--engine", "--link"}
LENGTHS = {"--lengths", "--image-sizes"}
SETTINGS = {
    "--batch-size",
    "--effective-batch-size",
    "--precision",
    "--optimizer",
    "--checkpointing",
}
ADAPTERS = {
    "--method",
    "--lora-r",
    "--lora-alpha",
    "--lora-dropout",
    "--target-modules",
    "--quantization",
    "--no-double-quantization",
    "--no-prepare-for-kbit",
}
OPTIONS = {
    "plan": COMMON
    | MODEL
    | SEVERAL
    | {"--price"}
    | LENGTHS
    | CARD
    | SETTINGS
    | ADAPTERS
    | SAMPLES
    | {
        "--details",
        "--objective",
        "--compile",
        "--optimizer-in-backward",
        "--report",
        "--save",
        "--snapshot",
        "--why",
    },
    "estimate": COMMON
    | MODEL
    | SEVERAL
    | LENGTHS
    | CARD
    | SETTINGS
    | ADAPTERS
    | SAMPLES
    | {"--loop", "--ema", "--max-grad-norm", "--evaluation-batch-size"}
    | {"--use-liger-kernel", "--packing"},
    "compare": COMMON
    | MODEL
    | SEVERAL
    | LENGTHS
    | SETTINGS
    | ADAPTERS
    | SAMPLES
    | {
        "--gpus",
        "--price",
        "--methods",
        "--headroom",
        "--host-ram",
        "--allocator",
        "--objective",
        "--report",
    },
    "layers": COMMON | MODEL,
    "check": COMMON
    | GIVEN
    | {
        *("PLAN.json", "--vram", "--gpu", "--headroom", "--host-ram", "--model"),
        "--trust-remote-code",
    },
    "verify": COMMON
    | GIVEN
    | {"PLAN.json", "--model", "--steps", "--device", "--trust-remote-code"},
    "show": COMMON | SAMPLES | {"PLAN.json", "--details", "--report"},
    "export": COMMON | {"PLAN.json", "--to", "--save"},
    "doctor": COMMON | {"--gpu"},
    "explain": COMMON | {"OOM.txt"},
    "gpus": COMMON,
    "cache info": COMMON,
    "cache clear": COMMON,
}


def test_commands_and_options_are_those_of_the_interface() -> None:
    commands = dict(vars(typer.main.get_command(app))["commands"])
    for name, command in commands.pop("cache").commands.items():
        commands[f"cache {name}"] = command

    assert set(commands) == set(OPTIONS)
    for name, command in commands.items():
        context = command.context_class(
            command, help_option_names=list(COMMON & {"--help", "-h"})
        )
        names = {
            option
            for parameter in command.get_params(context)
            for option in (
                filter(str.strip, (*parameter.opts, *parameter.secondary_opts))
                if parameter.param_type_name == "option"
                else [parameter.metavar]
            )
        }
        assert names == OPTIONS[name], name


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("plan", "this machine's"),
        ("check", "the planned one"),
        ("doctor", "this machine's"),
    ],
)
def test_the_help_says_which_card_counts_where_none_is_named(
    command: str, default: str
) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], terminal_width=100).stdout
    said = shown.split("--gpu ", 1)[1].replace("\u2502", " ").split()[:25]
    assert default in " ".join(said)
    assert ("--vram:" in said) == (command != "doctor")


def test_the_help_of_check_says_that_it_keeps_what_was_planned() -> None:
    shown = CliRunner().invoke(app, ["check", "--help"], terminal_width=100).stdout
    assert shown.count("as planned") == 2
