"""Damaged plan files: refused with the field named, or used without a traceback.

``python -m tests.fuzz.plan_files --number 2000 --seed 0`` damages saved plans, loads
each, and does with what was accepted all that can be done with a plan.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import io
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import budgetfit
from budgetfit.cli.app import EXPORTS
from budgetfit.reporting.json import plan_json, why_json
from budgetfit.traces.cache.folder import CACHE_VARIABLE
from tests.fuzz.mutations import mutated
from tests.fuzz.place import small, squares, write_place, write_plans
from tests.fuzz.workers import Outcome, default_jobs, report, run_all
from tests.models import gpt2

LARGEST_STEP = 64  # samples; what a test machine can run


def make_cases(
    number: int, seed: int, plans: dict[str, dict[str, Any]]
) -> list[tuple[str, bytes]]:
    """Return damaged plan files, the same ones for the same seed."""
    rng = random.Random(seed)
    return [mutated(rng, plans) for _ in range(number)]


def run_case(case: tuple[str, bytes], folder: Path) -> Outcome:
    """Load one file; use it where it is accepted."""
    what, data = case
    path = folder / f"case {os.getpid()}.json"
    path.write_bytes(data)
    done = "load"
    try:
        with quiet():
            try:
                plan = budgetfit.Plan.load(path)
            except budgetfit.InputError as error:
                return Outcome(what, "refused", _unclear(str(error)), str(error))
            for done, use in uses(plan, folder):  # noqa: B007
                with contextlib.suppress(budgetfit.BudgetfitError):
                    use()
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        fault = f"{type(error).__name__} in {done}"
        return Outcome(what, "traceback", fault, traceback.format_exc(limit=-4))
    return Outcome(what, "used")


def _unclear(message: str) -> str:
    """Say what is missing in a message, which names the field or the file's trouble."""
    named = (
        "damaged at '",
        "not a saved plan: ",
        "plan of this version",
        "Cannot read",
    )
    if not any(part in message for part in named):
        return "refused without a field"
    if len(message) > 600:
        return "refused at length"
    return ""


def uses(plan: budgetfit.Plan, folder: Path) -> Iterable[tuple[str, Any]]:
    """Yield all that can be done with a plan."""
    yield "print", lambda: str(plan)
    yield "numbers", lambda: (plan.fits, plan.estimate.samples_per_s, plan.budget)
    for row in plan.block_table[:2]:
        yield "why", functools.partial(plan.why, row.name)
    yield "save", lambda: _saved_again(plan, folder)
    yield "json", lambda: _json(plan)
    for target, module in EXPORTS.items():
        yield f"export to {target}", functools.partial(_export, plan, target, module)
    yield "apply", lambda: _applied(plan)


def _saved_again(plan: budgetfit.Plan, folder: Path) -> None:
    path = folder / f"again {os.getpid()}.json"
    plan.save(path)
    assert budgetfit.Plan.load(path) == plan


def _json(plan: budgetfit.Plan) -> None:
    plan_json(plan)
    for row in plan.block_table[:2]:
        why_json(row)


def _export(plan: budgetfit.Plan, target: str, module: str) -> None:
    text = importlib.import_module(module).export_text(plan, "plan.json")
    text.encode()
    if target not in {"torch", "trainer", "sft", "dpo", "lightning"}:
        return
    tree = ast.parse(text)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not {"INJECTED", "__import__"} & names, "a plan file wrote code"


@functools.cache
def _models() -> list[nn.Module]:
    return [gpt2(n_layer=2, n_positions=16), small()]


def _applied(plan: budgetfit.Plan) -> None:
    """Train a step on each model that a plan may be of; most are of another."""
    loss = None if (plan.provenance.get("asked") or {}).get("loss") is None else squares
    for model in _models():
        try:
            run = budgetfit.apply(plan, model, loss=loss, optimizer=torch.optim.Adagrad)
        except budgetfit.InputError:
            continue
        try:
            if plan.recipe.batch_size <= LARGEST_STEP:
                run.step(_batch(model, plan.recipe.batch_size))
        finally:
            run.undo()


def _batch(model: nn.Module, size: int) -> Any:
    if isinstance(model, nn.Sequential):
        return torch.zeros(size, 8)
    ids = torch.zeros(size, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


@contextlib.contextmanager
def quiet() -> Any:
    """Keep libraries' remarks off the screen."""
    sink = io.StringIO()
    with (
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    """Run what the command line asks for; return whether there are faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ[CACHE_VARIABLE] = "off"
    with tempfile.TemporaryDirectory() as name:
        folder = write_place(Path(name))
        with quiet():
            plans = write_plans(folder)
        os.chdir(folder)
        cases = make_cases(asked.number, asked.seed, plans)
        run = functools.partial(run_case, folder=folder)
        return report(run_all(cases, run, jobs=asked.jobs), asked.number)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
