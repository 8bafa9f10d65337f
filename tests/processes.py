"""Python in a process of its own, for what depends on a fresh one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(
    *words: str, check: bool = False, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter and return what it printed and how it ended.

    Args:
        words: What stands behind ``python``.
        check: Raise ``CalledProcessError`` where it ends with another code than 0.
        cwd: The folder it starts in.
        environment: Variables beside those of this process.
    """
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=check,
    )
