"""Undo stack for changes of a model, and which models have been changed."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_ABSENT = object()
# The run that has changed a model, so that no model gets a second one.
_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = (
    weakref.WeakKeyDictionary()
)
_LOCK = threading.Lock()


class Undo:
    """Reverts changes in reverse order; a second call does nothing.

    As a context manager it is a transaction: an error inside reverts the changes,
    otherwise they stay.
    """

    def __init__(self) -> None:
        self._changes = ExitStack()

    def add(self, restore: Callable[..., object], *args: object) -> None:
        """Register ``restore(*args)`` as the inverse of the change about to be made."""
        self._changes.callback(restore, *args)

    def set_attribute(self, module: nn.Module, name: str, value: object) -> None:
        """Set an instance attribute, bypassing ``nn.Module.__setattr__``."""
        before = module.__dict__.get(name, _ABSENT)
        self.add(_set_or_delete, module, name, before)
        module.__dict__[name] = value

    def hide_attribute(self, module: nn.Module, name: str) -> None:
        """Remove an instance attribute, so that the class attribute applies again."""
        if name in module.__dict__:
            self.add(_set_or_delete, module, name, module.__dict__.pop(name))

    def __call__(self) -> None:
        """Revert all changes."""
        self._changes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self()


def _set_or_delete(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


def claim(model: nn.Module, owner: object, undo: Undo) -> None:
    """Register ``owner`` as the run that modifies a model, until ``undo``.

    Raises:
        InputError: If another run modifies the model, a submodule or a parent of it.
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
