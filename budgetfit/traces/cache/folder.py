"""The folder of the cache: files named by a hash, evicted least recently used.

Traces and whole answers share it, and its limit. I/O errors never break a plan: an
unreadable file is a miss, and what cannot be written is not cached.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple, TypeVar

from platformdirs import user_cache_path

from budgetfit.utils.whole_file import whole_file

_T = TypeVar("_T")

CACHE_VARIABLE: Final = "BUDGETFIT_CACHE"
_OFF: Final = frozenset({"off", "no", "false", "0"})
# 2 to 4 MB hold a trace of a hundred blocks; a plan makes about ten.
LIMIT_BYTES: Final = 512 * 2**20
_LARGEST_FILE_BYTES: Final = LIMIT_BYTES // 4
# A killed writer leaves its temporary file behind; no writer takes an hour.
_ABANDONED_S: Final = 3600
_FINISHED: Final = re.compile(r"[0-9a-f]{64}\.(npz|json\.gz)")
_UNFINISHED: Final = re.compile(r"[0-9a-f]{64}\.[\w.]+\.new")


class CacheSize(NamedTuple):
    """Number of files and their total bytes."""

    files: int
    bytes: int


def cache_folder() -> Path | None:
    """Return the folder of the cache; None if caching is off.

    ``BUDGETFIT_CACHE`` is another folder, as an absolute path, or ``off``.
    """
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen.lower() in _OFF:
        return None
    try:
        folder = (
            Path(chosen).expanduser()
            if chosen
            else user_cache_path("budgetfit", appauthor=False) / "traces"
        )
    except RuntimeError:
        return None
    # Without a home "~" is not expanded, and would be a folder in the current one.
    return folder if folder.is_absolute() else None


class CacheFolder:
    """A folder of files with a size limit and least-recently-used eviction.

    Attributes:
        folder: None caches nothing.
        trouble: A problem that the user can fix, in a sentence; empty if none.
    """

    suffix = ""  # of the files that a subclass reads and writes

    def __init__(
        self, folder: Path | None = None, *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        """Use ``folder``, or that of ``cache_folder()``."""
        self.folder = folder if folder is not None else cache_folder()
        self.trouble = ""
        self._limit_bytes = limit_bytes

    def read(self, key: str | None, read: Callable[[Path, str], _T]) -> _T | None:
        """Return what ``read`` makes of the file of ``key``; None if there is none.

        ``read`` takes the path and the key, and may raise anything.
        """
        path = self._path(key)
        if path is None:
            return None
        try:
            if path.stat().st_size > _LARGEST_FILE_BYTES:
                return None
            found = read(path, str(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note_trouble("read from", error)
            return None
        except Exception:  # noqa: BLE001 - any damage is a miss
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # for the eviction order
        return found

    def write(self, key: str | None, write: Callable[[IO[bytes], str], None]) -> None:
        """Let ``write`` write the file of ``key``, if possible.

        Files are replaced atomically; of two writers the last one wins.
        """
        path = self._path(key)
        if path is None or self.trouble:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, private=True) as file:
                write(file, str(key))
            self._evict()
        except OSError as error:
            self._note_trouble("kept in", error)

    def size(self) -> CacheSize:
        """Return the number of cached files and their bytes."""
        sizes = [size for _, _, size in self._files()]
        return CacheSize(len(sizes), sum(sizes))

    def clear(self) -> CacheSize:
        """Delete all cached files, and nothing else; return their number and bytes."""
        removed = [
            size for path, _, size in self._files(unfinished=True) if _removed(path)
        ]
        return CacheSize(len(removed), sum(removed))

    def _note_trouble(self, what: str, error: OSError) -> None:
        reason = error.strerror or type(error).__name__
        self.trouble = (
            f"traces cannot be {what} {self.folder} ({reason}), so that every plan "
            f"makes them again: name another folder in {CACHE_VARIABLE}, or set it to "
            "off"
        )

    def _path(self, key: str | None) -> Path | None:
        if self.folder is None or key is None:
            return None
        path = self.folder / f"{key}{self.suffix}"
        # A key is a hash; anything else could name a file elsewhere.
        return (
            path
            if _FINISHED.fullmatch(path.name) and path.parent == self.folder
            else None
        )

    def _evict(self) -> None:
        for path, used_s, _ in self._files(unfinished=True):
            if path.suffix == ".new" and time.time() - used_s > _ABANDONED_S:
                _removed(path)
        files = sorted(self._files(), key=lambda file: file[1])
        too_much = sum(size for _, _, size in files) - self._limit_bytes
        for path, _, size in files:
            if too_much <= 0:
                break
            if _removed(path):
                too_much -= size

    def _files(self, *, unfinished: bool = False) -> Iterator[tuple[Path, float, int]]:
        """Yield path, time of last use and bytes of each file of the cache."""
        if self.folder is None:
            return
        try:
            entries = list(os.scandir(self.folder))
        except OSError:
            return
        for entry in entries:
            if _FINISHED.fullmatch(entry.name) or (
                unfinished and _UNFINISHED.fullmatch(entry.name)
            ):
                with contextlib.suppress(OSError):  # another process removed it
                    found = entry.stat(follow_symlinks=False)
                    yield Path(entry.path), found.st_mtime, found.st_size


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
