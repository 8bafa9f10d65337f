"""Run external tools and imports in subprocesses with a timeout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from budgetfit.doctor import import_library

_LIMIT_S: Final = 20.0
# On a slow disk the first import of torch takes half a minute.
IMPORT_LIMIT_S: Final = 40.0


class Output(NamedTuple):
    """Output of a program; ``code`` is None if it is missing or timed out."""

    code: int | None
    text: str


def run_tool(*words: str, limit_s: float = _LIMIT_S) -> Output:
    """Run a program and return its stdout and stderr."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments, no shell
            words,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return Output(None, f"no answer within {limit_s:.0f} s")
    except OSError:
        return Output(None, "")
    text = (done.stdout + b"\n" + done.stderr).decode("utf-8", errors="replace")
    return Output(done.returncode, text.strip())


def import_in_subprocess(name: str) -> dict[str, Any]:
    """Import a library in a subprocess; return its facts, or its ``error``."""
    # -P: the script's own folder must not be searched for the library.
    words = (sys.executable, "-P", str(Path(import_library.__file__)), name)
    output = run_tool(*words, limit_s=IMPORT_LIMIT_S)
    if output.code is None:  # a timeout is no error: the machine may be busy
        return {"import_timeout": output.text}
    for line in reversed(output.text.splitlines()):
        if line.startswith(import_library.MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(import_library.MARK))
            return answer
    last = (output.text.splitlines() or [""])[-1][:300]
    return {"error": f"the import ended with code {output.code}: {last}"}
