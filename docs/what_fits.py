"""Write ``docs/what-fits.md``: what fits on which card, as ``budgetfit compare`` says.

    python -m docs.what_fits                # ask what is missing, write the page
    python -m docs.what_fits Qwen3-0.6B     # ask only for some models
    python -m docs.what_fits --write        # ask nothing, write the page

Every answer is a line of ``docs/what_fits.jsonl``, and is not asked for again while its
command and the version of torch are the same. Without the file all are asked for again,
which takes half an hour.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.shared import ROOT, table
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text
from budgetfit.utils.whole_file import write_whole

PAGE: Final = ROOT / "docs" / "what-fits.md"
ANSWERS: Final = ROOT / "docs" / "what_fits.jsonl"
GPUS: Final = ("t4", "rtx-3060", "rtx-4090", "a100-80gb", "h100-80gb")
METHODS: Final = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
TOKENS: Final = 2048
EFFECTIVE_BATCH_SIZE: Final = 16
DOES_NOT_FIT: Final = 3  # exit code of compare where no card is large enough
VERSIONS: Final = ("budgetfit", "torch", "transformers")


class Model(NamedTuple):
    """A model, by the folder of its config in the repository and its hub id."""

    folder: str
    hub_id: str

    @property
    def name(self) -> str:
        """Its name on the page."""
        return Path(self.folder).name


MODELS: Final = (
    Model("tests/situations/configs/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    Model("tests/situations/configs/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
    Model("tests/situations/configs/Llama-3.2-3B", "meta-llama/Llama-3.2-3B"),
    Model("examples/configs/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    Model("tests/situations/configs/Qwen3-8B", "Qwen/Qwen3-8B"),
    Model("tests/situations/configs/Qwen3-14B", "Qwen/Qwen3-14B"),
)

# One line of ANSWERS: a model, a method, a card.
Answer = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Ask what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--write", action="store_true", help="ask nothing")
    wanted = parser.parse_args(arguments)
    names = [model.name for model in MODELS]
    for name in wanted.models:
        if name not in names:
            parser.error(f"{name!r} is not on the page; it has {', '.join(names)}")
    if not wanted.write:
        for model in MODELS:
            if not wanted.models or model.name in wanted.models:
                for method in METHODS:
                    ask(model, method)
    write_whole(PAGE, page(answers()))
    return 0


def command(model: Model, method: str) -> str:
    """Return the command, without ``budgetfit``, that answers for every card."""
    return (
        f"compare {model.folder} --gpus {','.join(GPUS)} --method {method} "
        f"--max-length {TOKENS} --effective-batch-size {EFFECTIVE_BATCH_SIZE}"
    )


def ask(model: Model, method: str) -> None:
    """Run the command, unless it is answered, and store a line for each card.

    Raises:
        RuntimeError: The command failed; with what it said.
    """
    words = command(model, method)
    versions = {name: version(name).partition("+")[0] for name in VERSIONS}
    if any(
        (answer["command"], answer["versions"]["torch"]) == (words, versions["torch"])
        for answer in answers()
    ):
        return
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "budgetfit", *shlex.split(words), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, DOES_NOT_FIT):
        raise RuntimeError(f"budgetfit {words}: {done.stderr[-2000:]}")
    seconds = round(time.perf_counter() - started)
    print(f"{seconds:6} s  {words}", file=sys.stderr)
    about = {
        "model": model.name,
        "command": words,
        "seconds": seconds,
        "versions": versions,
    }
    lines = [
        json.dumps(about | answer_of(card)) + "\n"
        for card in json.loads(done.stdout)["cards"]
    ]
    before = ANSWERS.read_text(encoding="utf-8") if ANSWERS.exists() else ""
    lines = sorted([*before.splitlines(keepends=True), *lines], key=_place)
    write_whole(ANSWERS, "".join(lines))


def _place(line: str) -> tuple[int, int]:
    """Return where an answer stands in the file, whenever it was asked for."""
    answer: Answer = json.loads(line)
    names = [model.name for model in MODELS]
    return names.index(answer["model"]), list(METHODS).index(answer["method"])


def answer_of(card: dict[str, Any]) -> Answer:
    """Return what the page tells of one card of ``compare --json``."""
    estimate, recipe = card["estimate"], card["estimate"]["recipe"]
    modes = Counter[str]()
    for segment in recipe["segments"]:
        modes[segment["mode"]] += len(segment["blocks"])
    return {
        "gpu": card["gpu"]["name"],
        "method": card["method"],
        "fits": card["fits"],
        "blocks": card["blocks"],
        "modes": dict(modes),
        "batch_size": recipe["batch_size"],
        "gradient_accumulation_steps": recipe["gradient_accumulation_steps"],
        "precision": recipe["precision"],
        "loss_chunks": recipe["loss_chunks"],
        "samples_per_s": card["samples_per_s"],
        "reserved_bytes": estimate["reserved_bytes"],
        "usable_bytes": estimate["usable_bytes"],
        "host_bytes": estimate["host_bytes"],
    }


def answers() -> list[Answer]:
    """Return the stored answers to today's commands, of several the latest."""
    if not ANSWERS.exists():
        return []
    asked = {command(model, method) for model in MODELS for method in METHODS}
    lines = ANSWERS.read_text(encoding="utf-8").splitlines()
    found = {
        (answer["command"], answer["gpu"]): answer for answer in map(json.loads, lines)
    }
    return [answer for answer in found.values() if answer["command"] in asked]


def page(found: list[Answer]) -> str:
    """Return the page that these answers make."""
    models = [
        model
        for model in MODELS
        if any(answer["model"] == model.name for answer in found)
    ]
    usable = {answer["gpu"]: answer["usable_bytes"] for answer in found}
    cards = [f"{gpu}, {format_bytes(usable[gpu])}" for gpu in GPUS if gpu in usable]
    overview = table(
        ("model", *cards),
        [(model.name, *_speeds(model, found)) for model in models],
        left=len(cards) + 1,
    )
    return (
        "\n\n".join(
            [
                _introduction(found),
                overview,
                *(_section(model, found) for model in models),
            ]
        ).rstrip()
        + "\n"
    )


def _introduction(found: list[Answer]) -> str:
    versions = sorted(
        {
            ", ".join(f"{name} {number}" for name, number in answer["versions"].items())
            for answer in found
        }
    )
    return _INTRODUCTION.format(
        tokens=f"{TOKENS:,}",
        batch=EFFECTIVE_BATCH_SIZE,
        cells=len(found),
        commands=len(_once(found, "command")),
        versions="; ".join(versions),
    ).rstrip()


def _speeds(model: Model, found: list[Answer]) -> list[str]:
    """Return one cell for each card: what fits there, with its samples/s."""
    return [
        "<br>".join(
            f"{METHODS[answer['method']]}&nbsp;{rate_text(answer['samples_per_s'])}"
            for answer in found
            if (answer["model"], answer["gpu"]) == (model.name, gpu) and answer["fits"]
        )
        or "-"
        for gpu in GPUS
    ]


def _section(model: Model, found: list[Answer]) -> str:
    """Return a model's heading, its rows, and the commands behind a fold."""
    own = [answer for answer in found if answer["model"] == model.name]
    own.sort(key=lambda answer: GPUS.index(answer["gpu"]))
    blocks = f"blocks, of {own[0]['blocks']}"
    headers = ("card", "method", "batch", blocks, "samples/s", "reserved", "host")
    commands = "\n".join(f"budgetfit {each}" for each in _once(own, "command"))
    return (
        f"## {model.name}\n\nConfig of `{model.hub_id}`.\n\n"
        f"{table(headers, map(_row, own), left=4)}\n\n"
        f"<details><summary>What was run</summary><pre>{commands}</pre></details>"
    )


def _once(found: list[Answer], field: str) -> list[str]:
    return list(dict.fromkeys(answer[field] for answer in found))


def _row(answer: Answer) -> tuple[str, ...]:
    method = METHODS[answer["method"]]
    reserved = format_bytes(answer["reserved_bytes"])
    if not answer["fits"]:
        return (answer["gpu"], method, "does not fit", "", "", f"{reserved} needed", "")
    host = answer["host_bytes"]
    return (
        answer["gpu"],
        method,
        f"{answer['batch_size']} x {answer['gradient_accumulation_steps']}",
        _blocks(answer),
        rate_text(answer["samples_per_s"]),
        reserved,
        format_bytes(host) if host else "",
    )


def _blocks(answer: Answer) -> str:
    """Return what happens to the blocks, and to the loss."""
    blocks, modes = answer["blocks"], answer["modes"]
    parts = [
        words.format(modes[mode])
        for mode, words in _TREATMENTS.items()
        if mode in modes
    ]
    kept = blocks - sum(modes.values())
    parts += [f"keep {kept}"] if kept and modes else []
    text = ", ".join(parts) or "keep all"
    chunks = answer["loss_chunks"]
    return f"{text}; loss in {chunks} parts" if chunks > 1 else text


_TREATMENTS: Final = {
    "offload": "offload {}",
    "recompute": "recompute {}",
    "selective": "recompute {} but for some ops",
}
_INTRODUCTION: Final = """\
# What fits on your card

Language models on five cards, trained in full, with LoRA and with QLoRA: what fits,
with which settings, and how fast. `python -m docs.what_fits` asks budgetfit and writes
this page. No GPU was used: memory is predicted ([how well](accuracy.md)), and times are
estimates ([how well](times.md)).

* A sample has {tokens} tokens. An optimizer step takes {batch} samples, as batch size x
  gradient accumulation steps; the plan chooses them.
* Mixed precision, fp16 on the T4 and bf16 elsewhere, and fused AdamW. In full: fp32
  weights. LoRA: r=16 on all linear layers of a 16-bit base. QLoRA: of one in nf4 with
  double quantisation, prepared as peft does ([more](lora.md)).
* *blocks*: how many are kept, recomputed in the backward pass, or offloaded to pinned
  host memory. *host*: the host memory that takes, of 8 GiB beside the T4, whose free
  machines have little, and of 16 beside the others; `--host-ram 0` plans without.
* *reserved*: PyTorch's peak of reserved memory. Where nothing fits: what the settings
  with the lowest peak that was found take.

{cells} answers to {commands} commands, which stand below each table, with
{versions}. They read configs of the
repository: another model's hub id or folder goes in place of the path.

## What fits, in samples per second

Below each card its usable memory: without the CUDA context and the headroom. `-`: no
method fits.
"""


if __name__ == "__main__":
    sys.exit(main())
