"""Faults, spread over the package: each changes what one line does."""

import tomllib
from pathlib import Path
from typing import Final, NamedTuple


class Fault(NamedTuple):
    """A line of the package, what it becomes, and the tests that should notice."""

    file: str
    line: str
    becomes: str
    tests: str


_FILE: Final = Path(__file__).with_name("faults.toml")
FAULTS: Final = tuple(
    Fault(**row) for row in tomllib.loads(_FILE.read_text("utf-8"))["fault"]
)
