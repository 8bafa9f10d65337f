"""Evaluate between training steps with the planned batch: is it within the budget?

    python -m tests.accuracy.nulldriver.install --also accelerate peft lightning trl
    python -m tests.accuracy.evaluation [--null-driver FOLDER] [NAME...]

A name is a case of ``evaluation_cases.py`` or a pattern. Each case is planned; then
``evaluation_loops.py`` trains and evaluates by each export in a process of its own, on
the null driver, or on this card with ``--real``. The device is limited to what the plan
may use: a batch is within the budget if memory does not run out. One that is not is
measured again without the limit. Prints a Markdown table, worst first.
"""

import argparse
import ast
import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import budgetfit
from budgetfit.core.plan import Plan
from budgetfit.integrations.exports import axolotl, llamafactory, trainer, trl
from tests.accuracy.evaluation_cases import CASES, LORA_RANK, Evaluated
from tests.accuracy.nulldriver.run import default_environment
from tests.accuracy.training import build_batch, build_model

ROOT: Final = Path(__file__).parents[2]
MIB: Final = 2**20
FACTORS: Final = (17 / 16, 9 / 8, 5 / 4, 3 / 2, 2)  # how much larger it might have been
# A loop, whether it gathers predictions, and arguments that a user adds.
Loop = tuple[str, bool, dict[str, Any]]
LOOPS: Final[dict[str, Loop]] = {
    "trainer": ("trainer", False, {}),
    "accelerate": ("accelerate", False, {}),
    "lightning": ("lightning", False, {}),
    "torch": ("torch", False, {}),
    "sft": ("sft", False, {}),
    "dpo": ("dpo", False, {}),
    "trainer, compute_metrics": ("trainer", True, {}),
    "trainer, compute_metrics, eval_accumulation_steps=None": (
        "trainer",
        True,
        {"eval_accumulation_steps": None},
    ),
}
PROGRAMS: Final[dict[str, tuple[Callable[[Plan, str], str], str]]] = {
    "trainer": (trainer.export_text, "TrainingArguments"),
    "sft": (trl.export_text, "SFTConfig"),
    "dpo": (trl.dpo_text, "DPOConfig"),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case in one loop.

    Attributes:
        case: Its name.
        loop: A key of ``LOOPS``.
        samples: The planned batch; the loop's own, where a sample of it is a pair.
        fits: Whether memory lasted within the budget.
        allocated_bytes: Peak while evaluating; without a limit where it did not fit.
        reserved_bytes: As ``allocated_bytes``.
        usable_bytes: Of the plan's budget.
        retries: How often the allocator had to empty its cache.
        largest: The largest batch that was tried and fits.
        next_power_fits: Whether the next power of two does.
        trained: Whether the training before it was within the budget.
    """

    case: str
    loop: str
    samples: int
    fits: bool
    allocated_bytes: int
    reserved_bytes: int
    usable_bytes: int
    retries: int
    largest: int
    next_power_fits: bool
    trained: bool

    @property
    def share(self) -> float:
        """What was allocated, of the budget; what was reserved where it did not fit."""
        peak = self.allocated_bytes if self.fits else self.reserved_bytes
        return peak / self.usable_bytes


def plan_of(evaluated: Evaluated) -> Plan:
    """Plan a case without its weights.

    Raises:
        ValueError: If the plan has no evaluation batch to measure.
    """
    case = evaluated.case
    model = build_model(case.model, "meta")
    if evaluated.lora:
        model.to(torch.bfloat16)
    batch_size = None if evaluated.full else case.batch_size
    plan = budgetfit.plan(
        model,
        gpu=case.gpu,
        vram=evaluated.vram,
        batch=build_batch(case, 2),
        precision=case.precision,
        batch_size=batch_size,
        effective_batch_size=32 if evaluated.full else batch_size,
        checkpointing="none" if case.checkpointing == "keep" else "full",
        method="lora" if evaluated.lora else None,
        lora_r=LORA_RANK,
    )
    if not plan.estimate.eval_batch_size:
        raise ValueError(f"{case.name}: no evaluation batch fits {evaluated.vram}")
    return plan


def keywords(program: str, function: str) -> dict[str, Any]:
    """Return the arguments of the one call of ``function`` in a program's source.

    Raises:
        ValueError: If the program needs budgetfit: what is measured must not.
    """
    if "import budgetfit" in program:
        raise ValueError("the exported program needs budgetfit")
    calls = [
        node
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == function
    ]
    (call,) = calls
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def settings(plan: Plan, loop: str) -> dict[str, Any]:
    """Return what is exported to a loop."""
    if loop in PROGRAMS:
        export, function = PROGRAMS[loop]
        return keywords(export(plan, "plan.json"), function)
    if loop == "accelerate":
        return {"mixed_precision": plan.to_accelerate_config()["mixed_precision"]}
    return plan.to_lightning_arguments() if loop == "lightning" else {}


def in_files(plan: Plan) -> set[int]:
    """Return the evaluation batches in exported files, whose programs are not run."""
    texts = [
        each.export_text(plan, "plan.json")
        for each in (llamafactory, axolotl)
        if "input_ids" in plan.model.batch and plan.recipe.precision != "fp16-mixed"
    ]
    found = re.findall(r"eval_batch_size: (\d+)", "\n".join(texts))
    return {int(each) for each in found}


def larger(samples: int) -> list[int]:
    """Return batches above the planned one, the next power of two among them."""
    tried = {-int(-samples * factor // 1) for factor in FACTORS}
    return sorted({*tried, next_power(samples)})


def next_power(samples: int) -> int:
    """Return the smallest power of two above."""
    return 1 << samples.bit_length()


def loops_of(evaluated: Evaluated) -> Iterator[str]:
    """Yield the loops that a case is evaluated in."""
    yield from ("trainer", "accelerate", "lightning", "torch")
    for name, (loop, gathers, _) in LOOPS.items():
        if loop in evaluated.also or (gathers and "metrics" in evaluated.also):
            yield name


class Measurement:
    """Runs one case in one loop, each time in a process of its own."""

    def __init__(self, evaluated: Evaluated, plan: Plan, name: str) -> None:
        self._case, self._name = evaluated.case, name
        loop, gathers, added = LOOPS[name]
        arguments = {**settings(plan, loop), **added}
        self.usable = plan.budget.usable_bytes
        size, found = plan.recipe.batch_size, plan.estimate.eval_batch_size
        assert found is not None
        self.samples: int = arguments.get("per_device_eval_batch_size", found)
        self._asked = {
            "case": self._case.name,
            "loop": loop,
            "metrics": gathers,
            "arguments": arguments,
            "batch_size": arguments.get("per_device_train_batch_size", size),
            "gradient_accumulation_steps": plan.recipe.gradient_accumulation_steps,
        }

    def run(self, launcher: Sequence[str]) -> Outcome:
        """Measure the planned batch, and larger ones if it fits."""

        def measure(training: int | None, evaluation: int | None) -> list[Any]:
            limits = {"training": training, "evaluation": evaluation}
            batches = [self.samples]
            if evaluation is not None and not self._asked["metrics"]:
                batches += larger(self.samples)  # what is gathered fills the host
            asked = {**self._asked, "limits": limits, "evaluation_batches": batches}
            return _measured([*launcher, json.dumps(asked)])

        rows = measure(self.usable, self.usable)
        trained = rows[0]["fits"]
        if not trained:
            rows = measure(None, self.usable)
        planned = rows[1]
        if not planned["fits"]:
            planned = {**measure(None, None)[1], "fits": False}
        fitting = [row["samples"] for row in rows[1:] if row["fits"]]
        return Outcome(
            case=self._case.name,
            loop=self._name,
            samples=self.samples,
            fits=planned["fits"],
            allocated_bytes=planned["allocated_bytes"],
            reserved_bytes=planned["reserved_bytes"],
            usable_bytes=self.usable,
            retries=rows[1]["retries"],
            largest=max(fitting, default=0),
            next_power_fits=next_power(self.samples) in fitting,
            trained=trained,
        )


def _measured(command: Sequence[str]) -> list[Any]:
    """Run a process and return the rows of the JSON on its last line."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[-1]}:\n{done.stderr[-3000:]}")
    rows: list[Any] = json.loads(done.stdout.strip().splitlines()[-1])["rows"]
    return rows


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a Markdown table, worst first, and the counts."""
    rows = sorted(outcomes, key=lambda each: (each.fits, -each.share))
    head = (
        "| case | evaluated by | batch | allocated MiB | reserved MiB | usable MiB "
        "| share | within | largest that is |"
    )
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---|---:|"]
    lines += [
        f"| {each.case} | {each.loop} | {each.samples} "
        f"| {each.allocated_bytes / MIB:,.0f} | {each.reserved_bytes / MIB:,.0f} "
        f"| {each.usable_bytes / MIB:,.0f} | {each.share:.1%} "
        f"| {'yes' if each.fits else 'NO'}{'' if each.trained else ', training not'} "
        f"| {each.largest or 'smaller'} |"
        for each in rows
    ]
    return "\n".join([*lines, "", *_counts(rows)])


def _counts(rows: Sequence[Outcome]) -> Iterator[str]:
    for name in LOOPS:
        mine = [each for each in rows if each.loop == name]
        if mine:
            within = sum(each.fits for each in mine)
            power = sum(each.next_power_fits for each in mine)
            factors = sorted(each.largest / each.samples for each in mine if each.fits)
            middle = factors[len(factors) // 2] if factors else 0
            yield (
                f"* {name}: within budget {within} of {len(mine)}; the next power of "
                f"two too in {power}; median of the largest tried that fits: "
                f"{middle:.2f} times the planned batch"
            )


def main() -> int:
    """Measure the cases that the command line names and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="NAME")
    parser.add_argument("--null-driver", type=Path, default=default_environment())
    parser.add_argument("--real", action="store_true", help="on this machine's card")
    parser.add_argument("--loops", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    options = parser.parse_args()
    torch.backends.cudnn.enabled = False  # as in the programs
    outcomes, failed, start = [], 0, [sys.executable, "-m"]
    for evaluated in CASES.values():
        case = evaluated.case
        if not any(fnmatch.fnmatchcase(case.name, each) for each in options.patterns):
            continue
        plan = plan_of(evaluated)
        if other := in_files(plan) - {plan.estimate.eval_batch_size}:
            raise ValueError(f"{case.name}: files with other batches: {other}")
        launcher = [*start, "tests.accuracy.evaluation_loops"]
        if not options.real:
            folder = str(options.null_driver.resolve())
            launcher = [*start, "tests.accuracy.nulldriver.run", "--gpu", case.gpu]
            launcher += ["--environment", folder, "--", "python", "-m"]
            launcher.append("tests.accuracy.evaluation_loops")
        for name in loops_of(evaluated):
            if name not in options.loops:
                continue
            try:
                outcome = Measurement(evaluated, plan, name).run(launcher)
            except RuntimeError as error:
                failed += 1
                sys.stdout.write(f"not measured: {case.name}, {name}: {error}\n")
                continue
            outcomes.append(outcome)
            sys.stdout.write(f"{outcome}\n")
            sys.stdout.flush()
    sys.stdout.write(f"\n{table(outcomes)}\n* not measured: {failed}\n")
    return 0 if all(each.fits for each in outcomes) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
