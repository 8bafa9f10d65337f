"""How ``print`` shows an answer: rendering lives at the front door, which sets this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT: dict[str, Callable[[Any], str]] = {}


def text_of(value: Any) -> str:  # noqa: ANN401 - one of the answers
    """Return the answer as a person reads it, by the name of its class."""
    render = TEXT.get(type(value).__name__)
    return repr(value) if render is None else render(value)
