"""Collect garbage less often while millions of short-lived objects are made."""

import atexit
import contextlib
import gc
from collections.abc import Iterator
from typing import Final

NEW_OBJECTS: Final = 1_000_000  # between two collections; Python's default is 700


def collect_less_often() -> None:
    """Let more objects be made between two collections, unless that is turned off."""
    # While torch and transformers are imported, collections by Python's default visit
    # all their objects again and again and find nothing: more than a second of
    # processor time. With every 100,000th object instead of every millionth it is still
    # 0.3 s, and 0.6 s of a longer plan, for 20 MB less.
    thresholds = gc.get_threshold()
    if thresholds[0]:  # 0: the user has turned collection off
        gc.set_threshold(max(thresholds[0], NEW_OBJECTS), *thresholds[1:])


def collect_nothing_at_exit() -> None:
    """Exclude what exists when the process ends from Python's last collections."""
    # Those visit all of torch, transformers and the traces several times before the
    # memory is given back anyway: 1.5 to 2 s of processor time.
    atexit.register(gc.freeze)


@contextlib.contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection (``gc.freeze``)."""
    # Planning makes millions of short-lived objects, and each full collection would
    # visit all of torch and the model: 10 % of the time. What it makes is collected
    # less often than by default. Objects that the user has frozen stay frozen.
    thresholds = gc.get_threshold()
    collect_less_often()
    frozen = gc.get_freeze_count()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()
