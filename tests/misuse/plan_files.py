"""Plan files that were edited, damaged or mixed up."""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import budgetfit
from budgetfit import InputError, Plan
from tests.applying.small_models import make
from tests.misuse.case import refused, right
from tests.misuse.training import (
    apply_unharmed,
    assert_steps_as_plain,
    batches,
    faster,
    plan_of,
)


@functools.cache
def _text() -> str:
    return plan_of().to_json()


def _edited(edit: Callable[[dict[str, Any]], object]) -> Plan:
    data = json.loads(_text())
    edit(data)
    return Plan.from_json(json.dumps(data))


def _recipe(**changes: Any) -> Plan:
    return _edited(lambda data: data["recipe"].update(changes))


@refused("format|version", InputError)
def of_another_format() -> None:
    """A plan file of a later version."""
    _edited(lambda data: data.update(format=99))


@refused("batch_size", InputError)
def edited_batch_size() -> None:
    """A batch size of 0 typed into a plan file."""
    _recipe(batch_size=0)


@refused("damaged|recipe|estimate", InputError)
def edited_batch_size_alone() -> None:
    """A larger batch size typed into a plan file, its prediction as before."""
    _recipe(batch_size=4096)


@refused("accumulation", InputError)
def edited_accumulation() -> None:
    """gradient_accumulation_steps of 0 typed into a plan file."""
    _recipe(gradient_accumulation_steps=0)


@refused("batch_size", InputError)
def text_for_a_number() -> None:
    """ "batch_size": "four"."""
    _recipe(batch_size="four")


@refused("precision", InputError)
def an_unknown_precision() -> None:
    """A precision that does not exist typed into a plan file."""
    apply_unharmed(_recipe(precision="fp8"))


@refused("damaged|has no block|optimizer", InputError)
def an_unknown_optimizer() -> None:
    """An optimizer that does not exist typed into a plan file."""
    apply_unharmed(_recipe(optimizer="adamz"))


@refused("damaged|segments|blocks", InputError)
def blocks_twice() -> None:
    """A block named in two segments."""
    segment = json.loads(_text())["recipe"]["segments"][0]
    apply_unharmed(_recipe(segments=[segment, segment]))


@refused("colour", InputError)
def an_unknown_field() -> None:
    """A field that plans do not have."""
    _edited(lambda data: data.update(colour="red"))


@refused("recipe", InputError)
def a_missing_field() -> None:
    """A plan file without its recipe."""
    _edited(lambda data: data.pop("recipe"))


@refused("JSON|plan", InputError)
def cut_off() -> None:
    """A plan file that was cut off."""
    Plan.from_json(_text()[:500])


@refused("JSON|plan", InputError)
def another_file() -> None:
    """Plan.load("model.pt")."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save({"a": torch.ones(2)}, path)
        Plan.load(path)


@refused("nowhere.json", InputError)
def no_file() -> None:
    """Plan.load("nowhere.json")."""
    Plan.load("nowhere.json")


@refused("folder|directory", InputError)
def a_folder() -> None:
    """Plan.load of a folder."""
    Plan.load(tempfile.gettempdir())


@right()
def saved_and_loaded() -> None:
    """A plan saved, loaded and applied to a model made anew."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan_of().save(path)
        plan = Plan.load(path)
    assert_steps_as_plain(faster(budgetfit.apply(plan, make("stack"))), batches(1))


@refused("not a plan|plan", InputError)
def saved_as_an_estimate() -> None:
    """The JSON of budgetfit estimate --json loaded as a plan."""
    Plan.from_json('{"allocated_bytes": 12, "format": 1}')
