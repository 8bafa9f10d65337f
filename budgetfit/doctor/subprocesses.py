"""Programs that are asked for facts: each may be missing, fail or hang."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from budgetfit.doctor import probe

_LIMIT_S: Final = 20.0
# On a slow disk torch alone takes half a minute, the first time.
IMPORT_LIMIT_S: Final = 40.0


class Output(NamedTuple):
    """What a program printed; ``code`` is None if it is missing or was too slow."""

    code: int | None
    text: str


def run_tool(*words: str, limit_s: float = _LIMIT_S) -> Output:
    """Run a program and return what it printed, on either stream."""
    try:
        done = subprocess.run(  # noqa: S603 - our own words, no shell
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


def probe_library(name: str) -> dict[str, Any]:
    """Import a library in another process; return its facts, or its ``error``.

    One that takes too long is only ``unanswered``: a busy machine breaks no library.
    """
    # -P: the probe's own folder must not be searched for the library.
    words = (sys.executable, "-P", str(Path(probe.__file__)), name)
    output = run_tool(*words, limit_s=IMPORT_LIMIT_S)
    if output.code is None:
        return {"unanswered": output.text}
    for line in reversed(output.text.splitlines()):
        if line.startswith(probe.MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(probe.MARK))
            return answer
    last = (output.text.splitlines() or [""])[-1][:300]
    return {"error": f"the import ended with code {output.code}: {last}"}
