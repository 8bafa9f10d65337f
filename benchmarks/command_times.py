"""What a user waits for: forty commands that people type, each a process of its own.

    python -m benchmarks.command_times                  all, cold and warm
    python -m benchmarks.command_times qlora gpt2       those with such a word
    python -m benchmarks.command_times --profile NAME   where the time of one goes

Cold is without a cache of traces, warm the same command once more. Seconds
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
from pathlib import Path
from typing import Final

from benchmarks.shared import ROOT, table
from tests.situations.answer import DOES_NOT_FIT, FITS, ask, model_path

COMMANDS: Final = tuple(
    (ROOT / "benchmarks" / "commands.txt").read_text(encoding="utf-8").splitlines()
)


def words_of(command: str) -> list[str]:
    """Return what ``python`` is run with, the model as a folder or file."""
    name, model, *options = shlex.split(command)
    return ["-m", "budgetfit", name, model_path(model), *options]


def profile(command: str) -> None:
    """Print where the processor time of one command goes, without a cache."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "profile")
        code = ["-m", "cProfile", "-o", file, *words_of(command)]
        environment = {**os.environ, "BUDGETFIT_CACHE": "off", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *code], env=environment, check=False)
        show = "sort cumulative\nstats budgetfit 60\n"
        subprocess.run(
            [sys.executable, "-m", "pstats", file], input=show, text=True, check=True
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    wanted = set(asked.words)
    chosen = [each for each in COMMANDS if not wanted or wanted & set(each.split())]
    if asked.profile:
        profile(chosen[0])
        return
    rows, cold, warm = [], [], []
    for command in chosen:
        words = words_of(command)
        with tempfile.TemporaryDirectory() as cache:
            # Only the first import of an installation compiles its files.
            variables = {"BUDGETFIT_CACHE": cache, "PYTHONDONTWRITEBYTECODE": ""}
            runs = [ask(words, variables) for _ in range(2)]
        first, again = runs
        if first.code not in {FITS, DOES_NOT_FIT}:
            sys.exit(f"{command}: exit code {first.code}\n{first.stderr}")
        cold.append(first.cpu_s)
        warm.append(again.cpu_s)
        row = [
            f"{first.cpu_s:.1f}",
            f"{again.cpu_s:.1f}",
            f"{first.memory_gib:.2f}",
            str(first.code),
        ]
        rows.append([command, *row])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: -float(row[1]))
    headers = ["command", "cold, CPU s", "warm", "GiB", "exit"]
    print(table(headers, rows))
    print()
    for name, values in (("cold", cold), ("warm", warm)):
        median = statistics.median(values)
        print(f"{name}: median {median:.1f} s, most {max(values):.1f} s")


if __name__ == "__main__":
    main()
