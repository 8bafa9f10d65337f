"""Undo stack for changes of a model."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from torch import nn

_ABSENT = object()


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


def _set_or_delete(module: nn.Module, name: str, value: object) -> None:
    if value is _ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value
