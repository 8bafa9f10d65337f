"""Ask one question as a whole process, as a user does, and read its answer."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIGS = (HERE / "configs", ROOT / "examples" / "configs")
GIB = 2**30
FITS, USAGE, DOES_NOT_FIT = 0, 2, 3  # exit codes


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process said.

    Attributes:
        code: Its exit code.
        document: Its answer in JSON, ``{}`` where it printed none.
        stderr: What it wrote there.
        cpu_s: Processor time, of user and system.
        wall_s: Time by the clock.
        memory_gib: The most that the process held.
    """

    code: int
    document: dict[str, Any]
    stderr: str
    cpu_s: float
    wall_s: float
    memory_gib: float = 0.0

    @property
    def estimate(self) -> dict[str, Any]:
        """The estimate: of a plan, or the answer itself."""
        found: dict[str, Any] = self.document.get("estimate", self.document)
        return found

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that were estimated."""
        found: dict[str, Any] = self.estimate.get("recipe") or {}
        return found

    @property
    def error(self) -> dict[str, Any]:
        """The error's fields; ``{}`` where there is none."""
        found: dict[str, Any] = self.document.get("error", {})
        return found

    @property
    def suggestions(self) -> list[dict[str, Any]]:
        """What a refusal says would fit."""
        found: list[dict[str, Any]] = self.error.get("suggestions", [])
        return found

    @property
    def words(self) -> str:
        """Everything that it says in words."""
        return json.dumps(self.document) + self.stderr


def model_path(name: str) -> str:
    """Return the folder of a config, or a factory of ``modules.py``."""
    if name.startswith("modules:"):
        return f"{HERE / 'modules.py'}:{name.removeprefix('modules:')}"
    return next((str(root / name) for root in CONFIGS if (root / name).exists()), name)


def ask(words: Sequence[str], variables: Mapping[str, str] | None = None) -> Answer:
    """Run ``python`` with these words, from the repository's root.

    ``variables``: of the environment, beside those of this process.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        **(variables or {}),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=out, stderr=err
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.monotonic() - start
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    try:
        document = json.loads(texts[0])
    except ValueError:
        document = {}
    cpu_s = used.ru_utime + used.ru_stime
    memory_gib = used.ru_maxrss * 1024 / GIB
    code = process.returncode
    return Answer(code, document, texts[1], cpu_s, wall_s, memory_gib)
