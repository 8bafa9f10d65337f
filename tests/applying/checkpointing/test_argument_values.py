"""Numbers in containers that a block was given, and that are others when it runs again.

They are restored in every step: values are compared in a part of them only.
"""

import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from budgetfit.applying.checkpointing.argument_values import ArgumentValues
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from tests.applying.run.test_forward_inputs import NAMES, every_technique
from tests.hazards.kinds import WIDTH, Block
from tests.models import seed

STEPS = 7  # values are compared in the first five


@dataclass
class Given:
    """An object of a user's class."""

    scale: float
    mask: Tensor


class Slotted:
    """One without a ``__dict__``."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


Read, Write = Callable[[Any], float], Callable[[Any, float], None]


def _set(name: str) -> Write:
    return lambda given, value: setattr(given, name, value)


def _item(key: object) -> Write:
    return lambda given, value: given.__setitem__(key, value)


# How it is made, read and changed.
KINDS: dict[str, tuple[Callable[[Tensor], Any], Read, Write]] = {
    "dict": (lambda _: {"k": 1.0}, lambda g: g["k"], _item("k")),
    "ordered dict": (lambda _: OrderedDict(k=1.0), lambda g: g["k"], _item("k")),
    "user dict": (lambda _: UserDict(k=1.0), lambda g: g["k"], _item("k")),
    "dict with a tensor": (lambda t: {"t": t, "k": 1.0}, lambda g: g["k"], _item("k")),
    "a key that comes later": (
        lambda t: {"t": t},
        lambda g: g.get("k", 1.0),
        _item("k"),
    ),
    "nested": (
        lambda t: {"t": t, "k": {"k": 1.0}},
        lambda g: g["k"]["k"],
        lambda g, value: g.__setitem__("k", {"k": value}),
    ),
    "list": (lambda _: [1.0], lambda g: g[-1], list.append),
    "list with a tensor": (lambda t: [t, 1.0], lambda g: g[1], _item(1)),
    "deque": (lambda _: deque([1.0]), lambda g: g[-1], deque.append),
    "set": (lambda _: {1.0}, lambda g: sum(g) / len(g), set.add),
    "array": (lambda _: np.ones(1), lambda g: float(g[0]), _item(0)),
    "in a tuple": (
        lambda t: (t, [1.0]),
        lambda g: g[1][0],
        lambda g, value: g[1].__setitem__(0, value),
    ),
    "namespace": (lambda _: types.SimpleNamespace(k=1.0), lambda g: g.k, _set("k")),
    "object": (lambda t: Given(1.0, t), lambda g: g.scale, _set("scale")),
    "slots": (lambda _: Slotted(1.0), lambda g: g.scale, _set("scale")),
}


class Scaled(Block):
    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor, given: object = None) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)) * self.read(given))


class Changes(nn.Module):
    """Changes the number between its blocks; the next forward has a new container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.make, read, self.write = KINDS[kind]
        self.blocks = nn.ModuleList(Scaled(read) for _ in NAMES)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.make(torch.ones(WIDTH))
        for number, block in enumerate(self.blocks):
            x = block(x, given=self.last)
            self.write(self.last, 0.75 - number / 8)
        return x.square().mean()


def _trained(kind: str, segments: tuple[Segment, ...]) -> tuple[list[float], float]:
    """Return the losses, and the number in the last container after the backward."""
    seed(0)
    model = Changes(kind)
    recipe = Recipe(batch_size=4, precision="fp32", optimizer="sgd", segments=segments)
    with Run(model, recipe, learning_rate=0.5) as run:
        losses = [run.step(torch.ones(4, WIDTH)).item() for _ in range(STEPS)]
    return losses, KINDS[kind][1](model.last)


@every_technique
@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputation_finds_the_numbers_of_the_forward(
    kind: str, segments: tuple[Segment, ...]
) -> None:
    assert _trained(kind, segments) == _trained(kind, ())


def test_no_tensor_in_a_container_is_kept() -> None:
    tensors = [torch.ones(1) for _ in range(4)]
    kept = ArgumentValues(
        (tensors[0], [tensors[1], 1.0]), {"a": {"t": tensors[2], "n": [tensors[3]]}}
    )
    counts = [each._use_count() for each in tensors]
    del kept
    assert counts == [each._use_count() for each in tensors]


def test_what_is_added_to_a_container_with_tensors_stays() -> None:
    one, two = torch.ones(1), torch.ones(2)
    given, states = {"t": one, "k": 1}, [one, 1]
    kept = ArgumentValues((given, states), {})
    given |= {"u": two, "k": 2}
    states[1] = 2
    states.append(two)
    with kept.restored():
        assert given == {"t": one, "k": 1, "u": two}
        assert states[1:] == [1, two]
    assert given == {"t": one, "k": 2, "u": two}
    assert states[1:] == [2, two]
