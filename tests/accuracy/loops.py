"""Training loops: predicted against recorded memory.

    python -m tests.accuracy.nulldriver.install --also accelerate peft lightning trl \\
        liger-kernel
    python -m tests.accuracy.loops                       # predict, compare, print
    python -m tests.accuracy.loops --record [--null-driver FOLDER] [NAME...]

Recorded is what the real Trainer, SFTTrainer, ``Accelerator``, Lightning and a plain
loop take on the null driver (``loop_programs.py``); predicted is what
``budgetfit.estimate(model, recipe, loop=...)`` says. A name is a case of
``loop_cases.py`` or a pattern. Prints a Markdown table, worst first, and the counts.
Cases with Liger's kernels want liger-kernel, and with it triton, in both environments.
"""

import argparse
import fnmatch
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

import budgetfit
from budgetfit.core.recipe import Segment
from budgetfit.traces.loops.library_state import modules_restored
from budgetfit.tracing.blocks.find_blocks import find_blocks
from tests.accuracy.loop_cases import (
    CASES,
    GPU,
    KERNELS,
    LORA_RANK,
    STEPS,
    SWITCHES,
    LoopCase,
)
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.accuracy.nulldriver.run import default_environment
from tests.accuracy.predict import Peaks
from tests.accuracy.training import build_batch, build_model, with_lora

ROOT: Final = Path(__file__).parents[2]
RECORDED: Final = Path(__file__).with_name("loops.json")
MIB: Final = 2**20
EXAMPLE_SAMPLES: Final = 2


@dataclass(frozen=True, kw_only=True)
class Comparison(Peaks):
    """The peaks of the case of a name."""

    name: str


def recordings() -> dict[str, dict[str, Any]]:
    """What was recorded, by the names of cases."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())["cases"]
    return found


@null_driver_addresses()
def predict(wanted: LoopCase) -> budgetfit.Estimate:
    """Estimate a case without its weights."""
    if not wanted.liger:
        return _estimate(wanted)
    from tests.accuracy.loop_programs import use_liger

    getattr(transformers, wanted.case.model.builder)  # loaded before it is patched
    with modules_restored():
        use_liger(wanted.case)
        return _estimate(wanted)


def _estimate(wanted: LoopCase) -> budgetfit.Estimate:
    case = wanted.case
    model = build_model(case.model, "meta")
    if case.precision == "bf16" or wanted.saved_modules:
        model.to(torch.bfloat16)
    if wanted.saved_modules:
        saved = list(wanted.saved_modules)
        model = with_lora(model, r=LORA_RANK, modules_to_save=saved)
    blocks = find_blocks(model)
    recomputed = blocks if case.checkpointing == "recompute" else ()
    return budgetfit.estimate(
        model,
        budgetfit.Recipe(
            batch_size=case.batch_size,
            gradient_accumulation_steps=case.gradient_accumulation_steps,
            precision="as-is" if case.precision == "bf16" else case.precision,
            optimizer=case.optimizer,
            segments=tuple(Segment((name,)) for name in recomputed),
        ),
        gpu=GPU,
        batch=build_batch(case, EXAMPLE_SAMPLES),
        loop=budgetfit.Loop(**{"kind": wanted.loop, **dict(wanted.settings)}),
    )


def compare(wanted: LoopCase, recorded: dict[str, Any]) -> Comparison:
    """Predict a recorded case, over the steps that were recorded."""
    points = predict(wanted).timeline.points
    first = [point for point in points if point.step < STEPS]
    return Comparison(
        name=wanted.name,
        predicted_allocated=max(point.allocated_bytes for point in first),
        predicted_reserved=max(point.reserved_bytes for point in first),
        recorded_allocated=recorded["allocated_bytes"],
        recorded_reserved=recorded["reserved_bytes"],
    )


def table(rows: Sequence[Comparison]) -> str:
    """Return a Markdown table, worst first."""
    lines = [
        "| case | allocated MiB | reserved MiB | allocated | reserved |",
        "|---|---:|---:|---:|---:|",
    ]
    ordered = sorted(
        rows, key=lambda row: -max(abs(row.allocated_error), abs(row.reserved_error))
    )
    lines += [
        f"| {row.name} | {row.recorded_allocated / MIB:,.0f} "
        f"| {row.recorded_reserved / MIB:,.0f} | {row.allocated_error:+.3%} "
        f"| {row.reserved_error:+.2%} |"
        for row in ordered
    ]
    return "\n".join(lines)


def counts(rows: Sequence[Comparison]) -> Iterator[str]:
    """Yield medians and worst errors, of each loop and of the settings."""
    further = {"switches": SWITCHES, "kernels and packing": KERNELS}
    group_of = {each.name: what for what, cases in further.items() for each in cases}
    groups: dict[str, list[Comparison]] = {}
    for row in sorted(rows, key=lambda row: list(CASES).index(row.name)):
        name = group_of.get(row.name, CASES[row.name].loop)
        groups.setdefault(name, []).append(row)
    for name, mine in groups.items():
        yield f"* {name}, {len(mine)} cases: " + "; ".join(
            _spread(what, [getattr(row, f"{what}_error") for row in mine])
            for what in ("allocated", "reserved")
        )


def _spread(what: str, errors: list[float]) -> str:
    middle = statistics.median(map(abs, errors))
    worst = max(errors, key=abs)
    return f"{what} median {middle:.3%}, worst {worst:+.3%}"


def record(names: Sequence[str], environment: Path) -> None:
    """Record cases on the null driver, and add them to the file."""
    command = [sys.executable, "-m", "tests.accuracy.nulldriver.run", "--gpu", GPU]
    command += ["--environment", str(environment.resolve()), "--", "python", "-m"]
    command += ["tests.accuracy.loop_programs", *names]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    kept = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"cases": {}}
    for row in found:
        kept["gpu"], kept["origin"] = GPU, row["origin"]
        kept["software"] = row["software"]
        kept["cases"][row["name"]] = {
            key: row[key] for key in ("allocated_bytes", "reserved_bytes")
        }
    kept["cases"] = {
        name: kept["cases"][name] for name in CASES if name in kept["cases"]
    }
    RECORDED.write_text(json.dumps(kept, indent=1) + "\n")
    sys.stdout.write(f"recorded {len(found)} of {len(names)}\n")


def main() -> int:
    """Compare, or record, the cases that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="NAME")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--null-driver", type=Path, default=default_environment())
    options = parser.parse_args()
    names = [
        name
        for name in CASES
        if any(fnmatch.fnmatchcase(name, each) for each in options.patterns)
    ]
    if options.record:
        record(names, options.null_driver)
        return 0
    torch.backends.cudnn.enabled = False  # as in the programs
    recorded = recordings()
    rows = []
    failed = 0
    for name in names:
        try:
            rows.append(compare(CASES[name], recorded[name]))
        except budgetfit.BudgetfitError as error:
            failed += 1
            sys.stdout.write(f"not predicted: {name}: {error}\n")
            continue
        sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(table(rows) + "\n\n" + "\n".join(counts(rows)) + "\n")
    sys.stdout.write(f"* not predicted: {failed} of {len(names)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
