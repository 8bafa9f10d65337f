"""Undo: what was changed, in the order it was changed, and how to put it back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import nn

_ABSENT = object()


class Undo:
    """Puts back what was changed, last change first; a second call does nothing.

    As a context manager it guards the changes themselves: an error inside undoes them,
    a body that ends well leaves them in place (applying P5).
    """

    def __init__(self) -> None:
        self._changes = ExitStack()

    def add(self, put_back: Callable[..., object], *args: object) -> None:
        """Remember that ``put_back(*args)`` undoes the change about to be made."""
        self._changes.callback(put_back, *args)

    def set_on(self, module: nn.Module, name: str, value: object) -> None:
        """Set an attribute on this instance alone, as data and not as a submodule."""
        before = module.__dict__.get(name, _ABSENT)
        self.add(_set_or_delete, module, name, before)
        module.__dict__[name] = value

    def hide_on(self, module: nn.Module, name: str) -> None:
        """Take an instance attribute away so that the class's own shows again."""
        if name in module.__dict__:
            self.add(_set_or_delete, module, name, module.__dict__.pop(name))

    def __call__(self) -> None:
        """Put everything back."""
        self._changes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self()


def _set_or_delete(module: nn.Module, name: str, value: Any) -> None:  # noqa: ANN401
    if value is _ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value
