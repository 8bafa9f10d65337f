"""One step of a run after the other, and none after its end."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Turns:
    """Lets one step at a time run, until the run is undone."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self.ended = False

    def check(self) -> None:
        """Refuse to go on with a run that is undone.

        Raises:
            InputError: If it is.
        """
        if self.ended:
            raise InputError(
                "This run is undone: its model is the plain one again. Apply the plan "
                "to it once more to go on."
            )

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Refuse a step within a step: two would share gradients and random numbers.

        Raises:
            InputError: If one is running, or the run is undone.
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
