"""Hash budgetfit's own source files."""

from __future__ import annotations

import functools
import hashlib
import time
from pathlib import Path
from typing import Final

from budgetfit.traces.cache.code_hash import NotCacheableError

_STARTED_S: Final = time.time()


def package_hash() -> str:
    """Return a hash of budgetfit's source files.

    Raises:
        NotCacheableError: If they are not readable, or were edited after this process
            started, which may still run the old code.
    """
    folder = Path(__file__).parents[2]
    files = sorted((*folder.rglob("*.py"), *folder.rglob("*.toml")))
    stats = [path.stat() for path in files]
    if not files or max(stat.st_mtime for stat in stats) > _STARTED_S:
        raise NotCacheableError("budgetfit's own files, which have just changed")
    return _digest(tuple(map(str, files)), tuple(stat.st_mtime_ns for stat in stats))


@functools.cache
def _digest(files: tuple[str, ...], _mtimes_ns: tuple[int, ...]) -> str:
    hasher = hashlib.sha256()
    for file in files:
        content = Path(file).read_bytes()
        hasher.update(f"{Path(file).name} {len(content)}:".encode())
        hasher.update(content)
    return hasher.hexdigest()
