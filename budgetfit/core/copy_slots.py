"""What ``deepcopy`` of a ``torch.nn.Module`` forgets: values in ``__slots__``."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def copy_slots(modules: Iterable[object], copies: Mapping[int, Any]) -> None:
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
