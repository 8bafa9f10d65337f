"""One writer at a time, across processes; a lock that dies with its owner."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A writer holds it for milliseconds.
PATIENCE_S: Final = 10.0
_PAUSE_S: Final = 0.01

if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _try_lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def only_writer(lock: Path) -> Iterator[None]:
    """Wait until nobody else is in here with the same ``lock``, a file that is made.

    The file stays: removing it would let two in. The system gives the lock back when
    the file is closed, or its process dies.

    Raises:
        OSError: The file cannot be made or locked.
        TimeoutError: Somebody stayed for ``PATIENCE_S`` seconds.
    """
    with lock.open("ab") as file:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                _try_lock(file.fileno())
                break
            except (BlockingIOError, PermissionError) as error:
                if time.monotonic() > deadline:
                    text = f"another process has been writing for {PATIENCE_S:g} s"
                    raise TimeoutError(None, text, str(lock)) from error
                time.sleep(_PAUSE_S)
        yield
