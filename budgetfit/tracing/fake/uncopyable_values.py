"""Replacements for attributes of a model that ``deepcopy`` refuses."""

import copy
import io
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.errors import TraceError

# Reading them in the copy would advance the user's own.
_STATEFUL_READERS = (Iterator, io.IOBase)


def uncopyable_memo(model: nn.Module, memo: Mapping[int, object]) -> dict[int, Any]:
    """Return a ``deepcopy`` memo for attributes of modules that cannot be copied.

    Random generators are copied with their state. Locks, connections and other objects
    are shared with the copy, whose forward uses them as the model's would.

    ``memo``: objects with a replacement already: tensors.

    Raises:
        TraceError: If an attribute is an open file or an iterator, which the copy's
            forward would advance.
    """
    known: dict[int, Any] = {id(module): module for module in model.modules()}
    known |= memo
    found: dict[int, Any] = {}
    for path, module in model.named_modules():
        waiting = [
            (f"{path}.{name}" if path else name, value)
            for name, value in vars(module).items()
        ]
        while waiting:
            where, value = waiting.pop()
            if id(value) in known:
                continue
            known[id(value)] = value
            parts = _parts(value)
            if _is_copied(value, [part for _, part in parts]):
                waiting += [(f"{where}.{name}", part) for name, part in parts]
            else:
                found[id(value)] = _replacement(where, value, type(module).__name__)
    return found


def _is_copied(value: object, parts: Iterable[object]) -> bool:
    """Whether a value can be copied if all its parts can."""
    if isinstance(value, torch.Generator):
        return False  # torch's own copy reads its state under the fake mode
    try:
        copy.deepcopy(value, {id(part): part for part in parts})
    except Exception:  # noqa: BLE001 - whatever it refuses with
        return False
    return True


def _parts(value: object) -> list[tuple[object, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(value))
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, (type, types.FunctionType)):
        return []  # never copied
    return list(getattr(value, "__dict__", {}).items())


def _replacement(path: str, value: object, module: str) -> object:
    if isinstance(value, _STATEFUL_READERS):
        raise TraceError(
            f"The model cannot be copied to plan it: its {path!r} is a "
            f"{type(value).__name__}, and reading from it would change it for "
            "training. Hold what opens it instead: a path, or a function.",
            module=module,
            op="deepcopy",
        )
    if isinstance(value, torch.Generator):
        with _disable_current_modes():
            return torch.Generator(value.device).set_state(value.get_state())
    return value
