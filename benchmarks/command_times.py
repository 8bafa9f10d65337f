"""What a user waits for: forty commands that people type, each a process of its own.

    python -m benchmarks.command_times                  all, cold and warm
    python -m benchmarks.command_times qlora gpt2       those with such a word
    python -m benchmarks.command_times --profile NAME   where the time of one goes

Cold is without a cache of traces and plans, warm the same command once more. Seconds
are of processor time (user and system), imports included; memory is the most that the
process held. Targets: median 6 s and at most 15 s cold, median 3 s and at most 6 s
warm.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.shared import GIB, ROOT, config, table

MODULES: Final = ROOT / "tests" / "situations" / "modules.py"
COMMANDS: Final = tuple(
    (ROOT / "benchmarks" / "commands.txt").read_text(encoding="utf-8").splitlines()
)


class Taken(NamedTuple):
    """What one process took."""

    cpu_s: float
    first_line_s: float
    memory_gib: float
    code: int
    out: str


def words_of(command: str) -> list[str]:
    """Return the command's words, its model as the folder or file of this checkout."""
    name, model, *options = shlex.split(command)
    path = str(MODULES.parent / model) if ".py:" in model else config(model)
    return [name, path, *options]


def taken(words: Sequence[str], cache: str) -> Taken:
    """Run ``budgetfit`` with these words and measure the process."""
    environment = {
        **os.environ,
        "BUDGETFIT_CACHE": cache,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    started = time.monotonic()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-m", "budgetfit", *words],
            env=environment,
            stdout=out,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None  # noqa: S101
        process.stderr.readline()
        first_line_s = time.monotonic() - started
        process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().decode()
    return Taken(
        used.ru_utime + used.ru_stime,
        first_line_s,
        used.ru_maxrss * 1024 / GIB,
        process.returncode,
        text,
    )


def profile(command: str) -> None:
    """Print where the processor time of one command goes, without a cache."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "profile")
        code = ["-m", "cProfile", "-o", file, "-m", "budgetfit", *words_of(command)]
        environment = {**os.environ, "BUDGETFIT_CACHE": "off", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *code], env=environment, check=False)  # noqa: S603
        show = "sort cumulative\nstats budgetfit 60\n"
        subprocess.run(  # noqa: S603
            [sys.executable, "-m", "pstats", file], input=show, text=True, check=True
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    words = set(asked.words)
    chosen = [each for each in COMMANDS if not words or words & set(each.split())]
    if asked.profile:
        profile(chosen[0])
        return
    rows, cold, warm = [], [], []
    for command in chosen:
        with tempfile.TemporaryDirectory() as cache:
            first, again = (taken(words_of(command), cache) for _ in range(2))
        cold.append(first.cpu_s)
        warm.append(again.cpu_s)
        row = [
            f"{first.cpu_s:.1f}",
            f"{again.cpu_s:.1f}",
            f"{first.first_line_s:.1f}",
            f"{first.memory_gib:.2f}",
            str(first.code),
        ]
        rows.append([command, *row])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: -float(row[1]))
    headers = ["command", "cold, CPU s", "warm", "first line, s", "GiB", "exit"]
    print(table(headers, rows))
    print()
    for name, values in (("cold", cold), ("warm", warm)):
        median = statistics.median(values)
        print(f"{name}: median {median:.1f} s, most {max(values):.1f} s")


if __name__ == "__main__":
    main()
