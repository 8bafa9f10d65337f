"""What ``deepcopy`` refuses among a model's attributes, and what stands for it."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.core.errors import TraceError

if TYPE_CHECKING:
    from torch import nn

# The copy would read on from the user's own: planning would change the model.
_READ_ON = (Iterator, io.IOBase)


def stand_ins(model: nn.Module, memo: Mapping[int, Any]) -> dict[int, Any]:
    """Return a ``deepcopy`` memo for attributes of modules that cannot be copied.

    Random generators get a copy in the same state. Locks, connections and other things
    are shared with the copy: its forward uses them as the model's would.

    Args:
        model: Read only.
        memo: What is copied otherwise: tensors.

    Raises:
        TraceError: An open file or an iterator: reading from it would change it.
    """
    whole: dict[int, Any] = {id(module): module for module in model.modules()}
    whole |= memo
    found: dict[int, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            own = f"{path}.{name}" if path else name
            for where, refused in _refused(value, whole, own):
                found[id(refused)] = _stand_in(where, refused, type(module).__name__)
    return found


def _refused(
    value: Any,  # noqa: ANN401 - an attribute of any kind
    memo: dict[int, Any],
    path: str,
    seen: frozenset[int] = frozenset(),
) -> Iterator[tuple[str, Any]]:
    """Yield the innermost things in ``value`` that cannot be copied, with paths."""
    if id(value) in memo or id(value) in seen or _is_copied(value, memo):
        return
    inner = [
        found
        for name, part in _parts(value)
        for found in _refused(part, memo, f"{path}.{name}", seen | {id(value)})
    ]
    yield from inner or [(path, value)]


def _is_copied(value: Any, memo: dict[int, Any]) -> bool:  # noqa: ANN401
    if isinstance(value, torch.Generator):
        return False  # torch's own copy reads its state under the fake mode
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # noqa: BLE001 - whatever it refuses with
        return False
    return True


def _parts(value: Any) -> list[tuple[object, Any]]:  # noqa: ANN401
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(value))
    return list(getattr(value, "__dict__", {}).items())


def _stand_in(path: str, value: Any, module: str) -> Any:  # noqa: ANN401
    if isinstance(value, _READ_ON):
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
