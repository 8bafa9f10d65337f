"""The real command line on small models, and what an error must look like."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result
from typer.testing import CliRunner

from budgetfit.cli.app import app

ROOT = Path(__file__).parents[2]
without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CUDA device of this machine is the default"
)
CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FACTORIES = """
import torch
from torch import nn


def raises():
    raise ValueError("the weights\\nare not here")


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))

    def forward(self, x):
        return x @ self.weight


def frozen():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)


def batch():
    ids = torch.zeros(2, 8, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def own_loss(outputs, batch):
    return outputs.loss


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
"""


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def process(
    *words: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, with no more than it is given."""
    return subprocess.run(
        [sys.executable, "-m", "budgetfit", *words],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
        # A job that a script runs in the background ignores ctrl-C, its children too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def assert_one_line(result: Result, code: int, message: str) -> None:
    """Fail unless stderr is one line with the message, and stdout empty."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr


def write_models(folder: Path) -> Path:
    """Write a config, factories, and files that are neither."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "factories.py").write_text(FACTORIES)
    (folder / "broken.json").write_text('{"model_type": ')
    (folder / "empty").mkdir()
    return folder


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Set what ``budgetfit.cli.app.main`` sets for its own process."""
    log = transformers.utils.logging
    before = log.get_verbosity()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(before)
