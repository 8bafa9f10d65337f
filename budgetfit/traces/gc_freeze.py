"""Freeze existing objects out of garbage collection while a plan is made."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection (``gc.freeze``).

    Planning makes millions of short-lived objects, and each full collection would visit
    all of torch and the model: 10 % of the time. Objects that the user has frozen stay
    frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
