"""The zoo's memory: predicted against what PyTorch's CUDA host code takes.

    python -m tests.zoo.memory                 # predict, compare, print
    python -m tests.zoo.memory "causal LM" T5  # families, or names that hold a word
    python -m tests.zoo.memory --record        # train each on the null driver first

Every model trains in a plain loop in fp32, eight samples a step, as its constructor
leaves it (``plain_training.py``); ``budgetfit.estimate(model, loop="plain")`` predicts
it. Prints the models that differ, worst first, and the counts. Recording wants
``python -m tests.accuracy.nulldriver.install --also diffusers pillow``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import budgetfit
from budgetfit.batches.batch_tree import batch_size_of, resize_batch
from budgetfit.errors import BudgetfitError
from budgetfit.inputs.arguments import Arguments
from tests.accuracy.loops import Comparison
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.zoo.check import GPU
from tests.zoo.entry import Entry, zoo
from tests.zoo.run import is_wanted

ROOT: Final = Path(__file__).parents[2]
RECORDED: Final = Path(__file__).with_name("recorded_memory.json")
BATCH_SIZE: Final = 8
MIB: Final = 2**20


def recordings() -> dict[str, dict[str, Any]]:
    """What was recorded, by the models' names."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text("utf-8"))
    return found


def compare(name: str, recorded: dict[str, Any]) -> Comparison:
    """Predict a model that was recorded."""
    with null_driver_addresses(), torch.backends.cudnn.flags(enabled=False):
        entry = zoo()[name]
        recipe = budgetfit.Recipe(
            batch_size=BATCH_SIZE, precision="as-is", optimizer="adamw_torch"
        )
        found = budgetfit.estimate(
            _build(entry), recipe, gpu=GPU, loop="plain", **_asked(entry)
        )
    return Comparison(
        name=name,
        predicted_allocated=found.allocated_bytes,
        predicted_reserved=found.reserved_bytes,
        recorded_allocated=recorded["allocated"],
        recorded_reserved=recorded["reserved"],
    )


def _build(entry: Entry) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta" if entry.on_meta else "cpu"):
        return entry.build()


def _asked(entry: Entry) -> dict[str, Any]:
    """What a user says, but the precision: models train as they are."""
    return {key: entry.plan[key] for key in entry.plan if key != "precision"}


def _batch(entry: Entry) -> Any:
    """The batch that a plan is made with, at the recorded size."""
    source = Arguments(model=_build(entry), gpu=GPU, **_asked(entry)).parsed().source
    if batch_size_of(source.batch, dims=source.batch_dims) == BATCH_SIZE:
        return source.batch
    return resize_batch(source.batch, BATCH_SIZE, dims=source.batch_dims)


def record(names: Sequence[str]) -> None:
    """Train models on the null driver and write what each of them took."""
    found = recordings() if RECORDED.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                torch.save(_batch(zoo()[name]), Path(folder) / f"{name}.pt")
            except BudgetfitError as error:
                print(f"{name}: {error}", file=sys.stderr)
        for row in _trained(folder):
            name = row.pop("name")
            print(f"{name}: {row}", file=sys.stderr)
            found[name] = row
            rows = (
                f"{json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found)
            )
            RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")


def _trained(folder: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.accuracy.nulldriver.run", "--gpu", GPU]
    command += ["--", "python", "-m", "tests.zoo.plain_training", folder]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("{"):
                yield json.loads(line)


def main() -> int:
    """Record what is asked for, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="families, or parts of names")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    wanted = [name for name in zoo() if is_wanted(name, options.words)]
    if options.record:
        record(wanted)
    known = recordings()
    rows, failed = [], []
    for name in wanted:
        if "allocated" not in known.get(name, {}):
            failed.append(f"{name}: {known.get(name, {}).get('error', 'not recorded')}")
            continue
        try:
            rows.append(compare(name, known[name]))
        except BudgetfitError as error:
            failed.append(f"{name}: not predicted: {error}")
    print(*_report(rows, failed), sep="\n")
    return 0


def _report(rows: Sequence[Comparison], failed: Sequence[str]) -> list[str]:
    rows = sorted(rows, key=lambda row: -abs(row.allocated_error))
    lines = [
        f"{row.name:46} allocated "
        f"{row.predicted_allocated - row.recorded_allocated:+12,} bytes "
        f"{row.allocated_error:+8.3%}  reserved "
        f"{(row.predicted_reserved - row.recorded_reserved) / MIB:+6.0f} MiB "
        f"{row.reserved_error:+7.2%}"
        for row in rows
        if row.allocated_error or row.reserved_error
    ]
    if rows:
        both = sum(not (row.allocated_error or row.reserved_error) for row in rows)
        allocated = [row.allocated_error for row in rows]
        reserved = [row.reserved_error for row in rows]
        lines.append(f"{both} of {len(rows)} equal to the byte, allocated and reserved")
        for what, errors in ("allocated", allocated), ("reserved", reserved):
            lines.append(
                f"{what}: median {statistics.median(errors):+.3%}, "
                f"lowest {min(errors):+.3%}, highest {max(errors):+.3%}"
            )
    return [*lines, *failed]


if __name__ == "__main__":
    sys.exit(main())
