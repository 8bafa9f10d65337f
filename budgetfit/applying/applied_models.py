"""Registry of models with an applied plan, so that no model gets a second one."""

import threading
import weakref

from torch import nn

from budgetfit.applying.undo import Undo
from budgetfit.errors import InputError

_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = (
    weakref.WeakKeyDictionary()
)
_LOCK = threading.Lock()


def claim(model: nn.Module, owner: object, undo: Undo) -> None:
    """Register the run that modifies a model, until ``undo``; refuse a second one."""
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
