"""A folder with models, plans and files that are neither, under names of all kinds."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import budgetfit
from tests.cli.real_cli import CONFIG, write_models
from tests.explain import messages
from tests.fuzz.surroundings import write_tool
from tests.models import alone

ODD_FOLDERS = ("with space", "ünï☃", "line\nbreak", "[bold]", "-dash", "a:b")
# A line that trains; the plan was made with it, and knows its name only.


def squares(outputs: torch.Tensor, _: object) -> torch.Tensor:
    """Return a loss."""
    return outputs.square().mean()


def small() -> nn.Module:
    """Return a chain of equal blocks."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def write_place(folder: Path) -> Path:
    """Write models, and the same ones in folders with odd names."""
    for name in ODD_FOLDERS:
        (folder / name).mkdir()
        write_models(folder / name)
    write_models(folder)
    (folder / "wrong.py").write_text(WRONG)
    (folder / "lengths.txt").write_text("8 10\n16 2\n")
    (folder / "bad_lengths.txt").write_text("8 10\nsixteen\n")
    (folder / "empty.txt").write_text("")
    (folder / "bytes.bin").write_bytes(bytes(range(256)))
    (folder / "odd").mkdir()
    _write_messages(folder)
    write_tool(folder)
    (folder / "remote").mkdir()
    (folder / "remote" / "config.json").write_text(json.dumps(STRANGER))
    (folder / "remote" / "stranger.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    )
    return folder


def _write_messages(folder: Path) -> None:
    """Write out-of-memory messages as shells, terminals and full disks leave them."""
    message, log = messages.FULL, "step 1: loss 2.5\n"
    boxed = "\n".join(f"│ {message[at : at + 60]} │" for at in range(0, 500, 60))
    (folder / "oom.txt").write_text(message)
    (folder / "odd" / "öom ☃\n[x].log").write_text(log + "\n".join(messages.ALL))
    (folder / "utf16.txt").write_text(message, encoding="utf-16")
    (folder / "boxed.txt").write_text(boxed, encoding="utf-8")
    (folder / "cut.txt").write_text(message[:70])
    (folder / "binary.txt").write_bytes(bytes(range(256)) + message.encode() + b"\xc3")
    (folder / "large.txt").write_text(log * 600_000 + message)  # 10 MB
    (folder / "many.txt").write_text((message + "\n" + log) * 20_000)


# It fails while it runs.
WRONG = """
from torch import nn


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(5, 4)

    def forward(self, x):
        return self.second(self.first(x))
"""
# What a hub repository with code of its own holds.
STRANGER: dict[str, Any] = {
    **CONFIG,
    "model_type": "stranger",
    "architectures": ["StrangerModel"],
    "auto_map": {
        "AutoConfig": "stranger.StrangerConfig",
        "AutoModel": "stranger.StrangerModel",
        "AutoModelForCausalLM": "stranger.StrangerModel",
    },
}


def write_plans(folder: Path) -> dict[str, dict[str, Any]]:
    """Plan a few models, save the plans as ``NAME.json``, return their documents."""
    config = folder / "config.json"
    plans = {
        "full": budgetfit.plan(
            str(config), gpu="t4", batch_size=2, checkpointing="full"
        ),
        "sqrt": budgetfit.plan(
            str(config), gpu="rtx-4090", batch_size=2, checkpointing="sqrt"
        ),
        "factory": budgetfit.plan(
            f"{folder / 'factories.py'}:small", gpu="t4", batch_size=4
        ),
        "module": budgetfit.plan(
            small(),
            gpu="t4",
            batch=torch.zeros(2, 8),
            batch_size=2,
            loss=squares,
            optimizer=torch.optim.Adagrad,
        ),
        "qlora": budgetfit.plan(
            str(config),
            gpu="t4",
            batch_size=2,
            checkpointing="full",
            method="qlora",
            target_modules="c_attn",
        ),
    }
    for name, plan in plans.items():
        saved = plan if name == "factory" else alone(plan)
        saved.save(folder / f"{name}.json")
    shutil.copy(folder / "full.json", folder / "odd" / "plän ☃ of\nmine.json")
    return {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in plans
    }
