"""Garbage collections that leave alone what was there before a plan."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Keep garbage collections off the objects that exist already.

    Planning makes millions of short-lived objects, and each full collection would walk
    through all of torch and the model: a tenth of the time. Where somebody has frozen
    objects before, that arrangement stays.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
