"""What comes from outside: strangers' configs, interruptions, no home to write to."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.real_cli import (
    CONFIG,
    FACTORIES,
    assert_one_line,
    process,
    quiet_transformers,
    run,
)

# A model that is interrupted in the middle of its first forward.
INTERRUPTED = """
import os
import signal

from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            os.kill(os.getpid(), signal.SIGINT)
        return x
"""
RUNS = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "stranger.py").write_text(RUNS)
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_in_a_trace_ends_at_once_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(INTERRUPTED)
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    cache.mkdir()
    scratch.mkdir()

    result = process(
        *("plan", "model.py:Model", "--gpu", "t4"),
        cwd=tmp_path,
        BUDGETFIT_CACHE=str(cache),
        TMPDIR=str(scratch),
        PYTHONDONTWRITEBYTECODE="1",
    )

    assert result.returncode == 130
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    left = [*cache.iterdir(), *scratch.iterdir()]
    assert [path for path in left if "torchinductor" not in path.name] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("cache", "model.py", "scratch")
    ]


@pytest.mark.parametrize(
    "environment",
    [{"HOME": ""}, {"HOME": "relative", "BUDGETFIT_CACHE": "/dev/null/traces"}],
)
def test_without_a_home_to_write_to_plans_are_made_all_the_same(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    write_config(tmp_path)
    environment = {"BUDGETFIT_CACHE": "", "XDG_CACHE_HOME": "/dev/null"} | environment

    result = process(
        *("estimate", "config.json", "--gpu", "t4", "--batch-size", "2"),
        cwd=tmp_path,
        **environment,
    )

    assert result.returncode == 0, result.stderr
    assert "FITS" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("config.json", "stranger.py")
    ]


STRANGER: dict[str, Any] = {
    "model_type": "stranger",
    "architectures": ["StrangerModel"],
    "auto_map": {
        "AutoConfig": "stranger.StrangerConfig",
        "AutoModelForCausalLM": "stranger.StrangerModel",
    },
}


@pytest.mark.parametrize("command", ["plan", "estimate", "layers"])
def test_a_config_runs_no_code_of_its_own(tmp_path: Path, command: str) -> None:
    folder = write_config(tmp_path / "repository", **STRANGER)
    words = [] if command == "layers" else ["--gpu", "t4"]
    with quiet_transformers():
        result = run(command, folder, *words)
    assert_one_line(result, 2, "--trust-remote-code")
    assert not (folder / "ran").exists()


def test_a_known_architecture_is_built_without_the_code_beside_it(
    tmp_path: Path,
) -> None:
    folder = write_config(tmp_path / "repository", auto_map=STRANGER["auto_map"])
    with quiet_transformers():
        result = run("estimate", folder, "--gpu", "t4", "--batch-size", 2)
    assert result.exit_code == 0, result.output
    assert not (folder / "ran").exists()


def test_code_that_was_trusted_by_name_does_run(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "repository", **STRANGER)
    result = process(
        *("plan", "repository", "--gpu", "t4", "--trust-remote-code"),
        cwd=tmp_path,
        HF_HOME=str(tmp_path / "hub"),
        HF_HUB_OFFLINE="1",
    )
    assert result.returncode == 2  # it defines no model, but it ran
    assert "Traceback" not in result.stderr
    assert list((tmp_path / "hub").rglob("ran")), result.stderr
    assert folder.exists()


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_attention_from_a_hub_is_not_fetched_because_a_config_says_so(
    tmp_path: Path, name: str
) -> None:
    folder = write_config(tmp_path / "model", **{name: "someone/kernel"})
    with quiet_transformers():
        result = run("estimate", folder, "--gpu", "t4", "--batch-size", 2)
    assert result.exit_code in (0, 2), result.output
    assert "Traceback" not in result.output


def test_a_factory_file_runs_what_was_named_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(FACTORIES)
    (tmp_path / "other.py").write_text(RUNS)
    (tmp_path / "sitecustomize.py").write_text(RUNS)
    (tmp_path / "conftest.py").write_text(RUNS)
    result = run("estimate", f"{tmp_path / 'named.py'}:small", "--gpu", "t4")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "ran").exists()


def test_a_plan_file_cannot_name_a_factory_to_run(tmp_path: Path) -> None:
    model, plan = tmp_path / "model.py", tmp_path / "plan.json"
    model.write_text(FACTORIES)
    made = run(
        "plan", f"{model}:small", "--gpu", "t4", "--batch-size", 2, "--save", plan
    )
    assert made.exit_code == 0, made.output
    model.write_text(RUNS + FACTORIES)
    verified = run("verify", plan, "--device", "cpu")
    exported = run("export", plan, "--to", "torch")
    assert_one_line(verified, 2, "is not run unasked")
    assert exported.exit_code == 0, exported.output
    assert not (tmp_path / "ran").exists()
