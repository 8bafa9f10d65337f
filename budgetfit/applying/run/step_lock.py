"""Lock against concurrent or nested steps of a run."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


class StepLock:
    """Allows one step at a time, until the run is undone."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self.ended = False

    def check(self) -> None:
        """Refuse to use a run after ``undo``.

        Raises:
            InputError: If the run is undone.
        """
        if self.ended:
            raise InputError(
                "This run is undone: its model is the plain one again. Apply the plan "
                "to it once more to go on."
            )

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Hold the lock; two steps at once would share gradients and RNG states.

        Raises:
            InputError: If a step is running, or the run is undone.
        """
        self.check()
        if not self._running.acquire(blocking=False):
            raise InputError(
                "A step of this run is already running, in another thread or around "
                "this call (a hook, a loss). Call run.step one after the other."
            )
        try:
            yield
        finally:
            self._running.release()
