"""The command line on a real small model, from its config to a verified plan."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from budgetfit.api import plan as real_api
from budgetfit.cli.app import app
from budgetfit.core.plan import Plan
from budgetfit.inputs.arguments import Arguments
from tests.cli.fake_api import FakeApi
from tests.cli.real_cli import CONFIG


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_config_becomes_a_plan_that_verifies_and_exports(
    config: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"

    planned = run(
        *("plan", config, "--gpu", "t4", "--batch-size", "2"),
        *("--checkpointing", "full", "--effective-batch-size", "4", "--save", path),
    )
    verified = run("verify", path, "--device", "cpu")
    exported = run("export", path, "--to", "torch")

    assert planned.exit_code == 0, planned.output
    # compute capability 7.5 has no bf16: fp16 with a loss scaler
    assert "precision fp16-mixed" in planned.stdout
    assert "recompute all 2 blocks\n" in planned.stdout
    assert Plan.load(path).recipe.gradient_accumulation_steps == 2
    assert verified.exit_code == 0, verified.output
    assert "recomputed blocks: 2, as planned" in verified.stdout
    assert "transformers.GPT2LMHeadModel(config)" in exported.stdout


def test_an_estimate_of_the_model_as_it_is(config: str) -> None:
    result = run("estimate", config, "--vram", "8GB", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["recipe"]["precision"] == "as-is"
    # 2 blocks of 12 x 32^2 and 13 x 32 parameters, 64 + 16 embeddings of 32, a last
    # norm of 2 x 32: 28 032 parameters of 4 bytes, each tensor in units of 512 bytes
    assert document["at_peak_bytes"]["parameters"] >= 28_032 * 4


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("plan", "m"), "plan"),
        (("estimate", "m"), "estimate_settings"),
        (("compare", "m", "--gpus", "t4"), "compare"),
        (("layers", "m"), "layers"),
    ],
)
def test_the_command_line_calls_the_api_as_it_is(
    api: FakeApi, words: tuple[str, ...], name: str
) -> None:
    run(*words)
    [(called, args, kwargs)] = api.calls
    assert called == name
    function: Callable[..., object] = getattr(real_api, name)
    bound = inspect.signature(function).bind(*args, **kwargs)
    Arguments(model="m", **bound.arguments.get("given", {}))


def test_verify_is_called_as_it_is(api: FakeApi, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    api.answers["plan"].save(path)
    run("verify", path)
    [(_, args, kwargs)] = api.calls
    inspect.signature(real_api.verify).bind(*args, **kwargs)
