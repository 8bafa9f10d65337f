"""``copy.deepcopy`` of a model, with what it forgets and where it stops too early."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_DEEPEST: Final = 50_000  # Python's frames; deepcopy takes about four for each link


def copied(model: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - an nn.Module
    """Return a model's ``copy.deepcopy``, with what its modules hold in ``__slots__``.

    Objects linked in a long row are copied, too: every link takes some calls, and
    Python would stop after a thousand.
    """
    with _deeper_recursion():
        twin = copy.deepcopy(model, memo)
        _copy_slots(model.modules(), memo)
    return twin


@contextlib.contextmanager
def _deeper_recursion() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _copy_slots(modules: Iterable[object], copies: Mapping[int, Any]) -> None:
    """Give copies what is in ``__slots__``.

    Args:
        modules: Read only.
        copies: The ``deepcopy`` memo: ``id`` of an object -> its copy.
    """
    for module in modules:
        slots = [
            name
            for parent in type(module).__mro__
            for name in _as_names(parent.__dict__.get("__slots__", ()))
        ]
        twin = copies.get(id(module))
        for name in slots:
            if twin is not None and hasattr(module, name) and not hasattr(twin, name):
                setattr(twin, name, copy.deepcopy(getattr(module, name), dict(copies)))


def _as_names(slots: Any) -> tuple[str, ...]:  # noqa: ANN401 - text, or several
    return (slots,) if isinstance(slots, str) else tuple(slots)
