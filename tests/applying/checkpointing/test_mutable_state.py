"""What objects hold is put back in place, whatever kind of objects they are."""

import array
import collections
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.utils.mutable_state import mutable_state
from tests.hazards.kinds import COUNTING, ITERATING, OwnDict, Slots, Tower


def _own_dict() -> OwnDict:
    held = OwnDict(a=1)
    held.extra = 3
    return held


def _change_own_dict(held: OwnDict) -> None:
    held.tick()


def _set_slot(held: Slots) -> None:
    held.n = 5


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda held: held.pop()),
    "dict": (lambda: {"a": 1}, lambda held: held.update(b=2)),
    "set": (lambda: {1, 2}, lambda held: held.add(3)),
    "Counter": (lambda: collections.Counter("aab"), lambda held: held.update("b")),
    "defaultdict": (
        lambda: collections.defaultdict(list, a=[1]),
        lambda held: held["b"],
    ),
    "deque": (lambda: collections.deque([1, 2], 2), lambda held: held.append(3)),
    "bytearray": (lambda: bytearray(b"ab"), lambda held: held.extend(b"c")),
    "array": (lambda: array.array("i", [1]), lambda held: held.append(2)),
    "numpy": (lambda: np.array([1.0, np.nan]), lambda held: held.fill(2)),
    "numpy scalar": (lambda: np.array(1), lambda held: held.fill(2)),
    "own dict": (_own_dict, _change_own_dict),
    "tuple": (lambda: (0, [1]), lambda held: held[1].append(2)),
    "nested": (lambda: {"a": [{"b": {1}}]}, lambda held: held["a"][0]["b"].add(2)),
    "namespace": (
        lambda: types.SimpleNamespace(n=1, log=[1]),
        lambda held: (held.log.append(2), setattr(held, "more", 1)),
    ),
    "array of objects": (
        lambda: np.array([[1], None], dtype=object),
        lambda held: held[0].append(2),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_contents_are_put_back_in_place(kind: str) -> None:
    make, change = KINDS[kind]
    held = make()
    state = list(mutable_state([("held", held)]))
    assert not any(each.has_changed() for each in state)
    change(held)
    assert repr(held) != repr(make()) or kind == "own dict"
    assert any(each.has_changed() for each in state)
    for each in state:
        each.restore()
    assert repr(held) == repr(make())
    assert getattr(held, "__dict__", {}) == getattr(make(), "__dict__", {})


def test_order_slots_and_generators_are_put_back() -> None:
    ordered = collections.OrderedDict(a=1, b=2)
    slots, chance = Slots(), random.Random(3)
    roots = [("ordered", ordered), ("slots", slots), ("chance", chance)]
    state = list(mutable_state(roots))
    ordered.move_to_end("a")
    _set_slot(slots)
    drawn = chance.random()
    for each in state:
        each.restore()
    assert list(ordered) == ["a", "b"]
    assert list(reversed(ordered)) == ["b", "a"]  # the other one of its two tables
    assert not hasattr(slots, "n")
    assert chance.random() == drawn


def test_modules_libraries_and_circles_end_the_search() -> None:
    circle: list[Any] = [nn.Linear(2, 2), torch.ones(2), types, itertools]
    circle.append(circle)
    assert [each.target for each in mutable_state([("circle", circle)])] == [circle]


def test_large_objects_are_left_out_where_asked() -> None:
    roots = [("long", [0] * 100), ("short", [0])]
    assert [each.name for each in mutable_state(roots, limit=50)] == ["short"]


def test_iterators_are_named() -> None:
    found = [each for each in mutable_state([("a", {0: iter([])})]) if not each.parts]
    assert [(each.name, type(each.target).__name__) for each in found] == [
        ("a", "list_iterator")
    ]


def make(kind: Callable[[], Any]) -> Tower:
    torch.manual_seed(0)
    return Tower(kind)


def test_verify_leaves_counters_as_they_were() -> None:
    model, batch = make(COUNTING[0]), torch.ones(4, 8)
    settings = {"batch_size": 4, "precision": "fp32", "optimizer": "sgd"}
    plan = budgetfit.plan(
        model, batch=batch, vram="1GB", checkpointing="full", **settings
    )
    found = budgetfit.verify(plan, model, batch=batch, device="cpu")
    assert found.passed
    assert found.gradient_noise is None  # both runs of the plain model were equal
    held: Any = [block.held for block in model.blocks]
    assert held == [collections.Counter()] * 4


def test_blocks_with_an_iterator_are_always_kept() -> None:
    model, batch = make(ITERATING[0]), torch.ones(4, 8)
    plan = budgetfit.plan(model, batch=batch, vram="1GB", batch_size=4)
    assert "4 of 4 blocks have an iterator" in " ".join(str(plan).split())
    assert not plan.recipe.segments
