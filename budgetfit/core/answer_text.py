"""How ``print`` shows an answer: by ``reporting``, imported when somebody prints.

As the exports do, it names what these words must not import.
"""

from __future__ import annotations

from typing import Any

from budgetfit.utils.late_import import import_late


def text_of(value: Any, render: str) -> str:  # noqa: ANN401 - one of the answers
    """Return the answer as a person reads it, by a function of ``reporting.text``."""
    text: str = getattr(import_late("budgetfit.reporting.render"), render)(value)
    return text
