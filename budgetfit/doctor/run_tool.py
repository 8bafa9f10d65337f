"""Programs that are asked for facts: each may be missing, fail or hang."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from budgetfit.doctor import probe

_LIMIT_S: Final = 20.0  # a library that takes longer to import says so


class Output(NamedTuple):
    """What a program printed; ``code`` is None if it is missing or was too slow."""

    code: int | None
    text: str


def run_tool(*words: str) -> Output:
    """Run a program and return what it printed, on either stream."""
    try:
        done = subprocess.run(  # noqa: S603 - our own words, no shell
            words,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return Output(None, f"no answer within {_LIMIT_S:.0f} s")
    except OSError:
        return Output(None, "")
    text = (done.stdout + b"\n" + done.stderr).decode("utf-8", errors="replace")
    return Output(done.returncode, text.strip())


def probe_library(name: str) -> dict[str, Any]:
    """Import a library in another process; return its facts, or its ``error``."""
    # -P: the probe's own folder must not be searched for the library.
    output = run_tool(sys.executable, "-P", str(Path(probe.__file__)), name)
    for line in reversed(output.text.splitlines()):
        if line.startswith(probe.MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(probe.MARK))
            return answer
    last = (output.text.splitlines() or [""])[-1][:300]
    ended = f"the import ended with code {output.code}"
    return {"error": f"{ended}: {last}" if output.code is not None else last}
