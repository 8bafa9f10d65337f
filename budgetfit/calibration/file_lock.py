"""An exclusive file lock across processes, released when its owner exits."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Writers hold the lock for milliseconds.
TIMEOUT_S: Final = 10.0
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
def exclusive_lock(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file ``lock``, which is created if missing.

    The file is not removed: another process could then lock a new one. The operating
    system releases the lock when the file is closed or the process exits.

    Raises:
        OSError: The file cannot be made or locked.
        TimeoutError: Another process held it for ``TIMEOUT_S`` seconds.
    """
    with lock.open("ab") as file:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                _try_lock(file.fileno())
                break
            except (BlockingIOError, PermissionError) as error:
                if time.monotonic() > deadline:
                    text = f"another process has been writing for {TIMEOUT_S:g} s"
                    raise TimeoutError(None, text, str(lock)) from error
                time.sleep(_PAUSE_S)
        yield
