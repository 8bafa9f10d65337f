"""Libraries that behave differently when they notice fake tensors, told not to.

transformers skips looking at masks and position ids when it believes that a graph is
being traced, and then builds attention masks of length^2 that a real step does not
have. Here the values are known (``known_values``), so it may ask.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def values_matter() -> Iterator[None]:
    """Let transformers treat fake tensors as real ones while the context is open."""
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if module is None or original is None:
        yield
        return
    module.is_fake_tensor = lambda _: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = original  # type: ignore[attr-defined]
