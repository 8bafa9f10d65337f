"""Plant each fault in a copy of the repository and see whether its tests notice.

python -m tests.planted_faults.run              # all, a quarter of an hour
python -m tests.planted_faults.run solvers      # those in files with this in the name
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.planted_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
NOTICED = 1  # pytest's exit status where a test failed


def planted(fault: Fault, copy: Path) -> str:
    """Return a file's text with the fault in it.

    Raises:
        ValueError: If the line is not there, or more than once.
    """
    path = copy / "budgetfit" / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.line) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.line)} x {fault.line!r}")
    return text.replace(fault.line, fault.becomes)


def notices(fault: Fault, copy: Path) -> bool:
    """Whether one of the tests fails with the fault; the first named run first."""
    path = copy / "budgetfit" / fault.file
    before = path.read_text(encoding="utf-8")
    path.write_text(planted(fault, copy), encoding="utf-8")
    try:
        return any(_fails(f"tests/{name}", copy) for name in fault.tests.split())
    finally:
        path.write_text(before, encoding="utf-8")


def _fails(tests: str, copy: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, check=False
    )
    return result.returncode == NOTICED


def main() -> None:
    """Print a line for each fault, and how many were noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="")
    word = parser.parse_args().word
    faults = [fault for fault in FAULTS if word in fault.file]
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "site", "dist", "out", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for fault in faults:
            started = time.monotonic()
            found = notices(fault, copy)
            noticed += found
            word = "noticed" if found else "MISSED "
            seconds = time.monotonic() - started
            print(f"{word} {seconds:4.0f} s  {fault.file}: {fault.becomes.strip()}")
    print(f"{noticed} of {len(faults)} noticed")


if __name__ == "__main__":
    main()
