"""Files that are written whole or not at all.

The new content goes to a temporary file in the same folder, which then takes the place
of the old file. Whoever reads sees the old or the new one, and after a failure, such as
a full disk, the old one is as it was.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

# Of a long name; most file systems allow 255 bytes.
_KEPT_CHARACTERS: Final = 72


def write_whole(
    path: str | Path, content: str | bytes, *, private: bool = False
) -> None:
    """Write a file, text as UTF-8; the arguments and errors are ``whole_file``'s."""
    with whole_file(path, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_file(path: str | Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that becomes ``path`` when the block ends without an exception.

    An existing file keeps its permissions, and a symbolic link leads to the new one. A
    pipe or a device cannot be replaced and is written as it is. ``private``: a new file
    is for its owner alone.

    Raises:
        OSError: It cannot be written; no temporary file is left.
    """
    place = Path(os.path.realpath(path))
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        with place.open("wb") as file:
            yield file
        return
    if mode is not None:
        with place.open("r+b"):  # replacing a file would not ask for its permission
            pass
    new = place.with_name(f"{place.name[:_KEPT_CHARACTERS]}.{secrets.token_hex(4)}.new")
    try:
        with new.open("xb") as file:
            if private:
                new.chmod(0o600)
            yield file
        if mode is not None:
            new.chmod(stat.S_IMODE(mode))
        new.replace(place)
    except OSError as error:
        if error.filename == str(new):
            error.filename = str(path)
            del error.filename2  # of ``replace``; None would be part of the text
        raise
    finally:
        new.unlink(missing_ok=True)
