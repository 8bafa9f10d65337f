"""Which models train by a plan now: a second one would keep what the first changed."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from budgetfit.applying.undo import Undo

_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = (
    weakref.WeakKeyDictionary()
)
_LOCK = threading.Lock()


def claim(model: nn.Module, owner: object, undo: Undo) -> None:
    """Note that ``owner`` changes a model until ``undo``.

    Raises:
        InputError: If another one does, or changes a part of it, or what it is part of.
    """
    with _LOCK:
        _refuse_a_second_owner(model)
        _OWNERS[model] = weakref.ref(owner)
    undo.add(_OWNERS.pop, model, None)


def _refuse_a_second_owner(model: nn.Module) -> None:
    parts = set(model.modules())
    for other, known in _OWNERS.items():
        if other not in parts and model not in set(other.modules()):
            continue
        name = type(other).__name__
        if known() is None:
            raise InputError(
                f"{name} was changed by apply or prepare, and what undoes it is gone. "
                "Build the model anew, and keep what they return."
            )
        raise InputError(
            f"{name} trains by a plan already. Call undo() on what apply or prepare "
            "returned before you plan it anew; run.adopt(recipe) changes settings "
            "while training."
        )
