"""Train 30 steps by a plan in each of some 200 loops, and each without it.

``python -m tests.training_loops.run`` prints a row for each loop, those that differ
first, and counts. Words after it choose loops that have all of them: ``Trainer``,
``gpt2``, ``offload``; ``--updates 5`` trains less.
"""

import argparse
import importlib.util
import logging
import os
import sys
import time
from collections import Counter

import torch

from tests.training_loops.compare import (
    CLOSE,
    OTHER_TREATMENT,
    REFUSED,
    SAME,
    SILENT,
    Verdict,
    judge,
    trained,
)
from tests.training_loops.loops import Loop, loops
from tests.training_loops.own_loops import Trained

NEEDED = {
    "Trainer": "accelerate",
    "SFT": "trl",
    "DPO": "trl",
    "accelerate": "accelerate",
    "Lightning": "lightning",
    "DeepSpeed": "deepspeed",
}
FAILED = "FAILED"
NOT_RUN = "not run"
ORDER = (SILENT, OTHER_TREATMENT, FAILED, REFUSED, NOT_RUN, CLOSE, SAME)
BAD = {SILENT, OTHER_TREATMENT, FAILED}


def run(patterns: tuple[str, ...], updates: int) -> list[tuple[Loop, Verdict]]:
    """Train all chosen loops; the plain one once for all treatments."""
    found: list[tuple[Loop, Verdict]] = []
    plain: dict[object, Trained] = {}
    for loop in loops(patterns, updates):
        print(f"\r{len(found) + 1}: {loop!s:100s}", end="", file=sys.stderr, flush=True)
        found.append((loop, _one(loop, plain)))
    print(f"\r{'':110s}\r", end="", file=sys.stderr)
    return found


def _one(loop: Loop, plain: dict[object, Trained]) -> Verdict:
    library = NEEDED.get(loop.way)
    if library is not None and importlib.util.find_spec(library) is None:
        return Verdict(NOT_RUN, details=f"{library} is not installed")
    key = loop.way, loop.settings
    try:
        if key not in plain:
            plain.clear()
            plain[key] = trained(loop, None)
        return judge(loop, plain[key])
    except Exception as error:  # noqa: BLE001 - a row of the table, and a bad one
        where = "with a plan" if key in plain else "without a plan"
        return Verdict(FAILED, details=f"{where}: {type(error).__name__}: {error}")


def table(found: list[tuple[Loop, Verdict]]) -> str:
    """Return a row for each loop, bad ones first, and counts."""
    rows = [f"{'':76s}{'loss':>9s}{'weights':>9s}"]
    for loop, verdict in sorted(found, key=lambda row: ORDER.index(row[1].word)):
        numbers = f"{verdict.loss:9.1e}{verdict.weights:9.1e}"
        words = f"{verdict.word}{': ' if verdict.details else ''}{verdict.details}"
        rows.append(f"{loop!s:76s}{numbers}  {' '.join(words.split())}")
    counts = Counter(verdict.word for _, verdict in found)
    said = ", ".join(f"{counts[word]} {word}" for word in ORDER if counts[word])
    updates = {loop.settings.updates for loop, _ in found}
    steps = "/".join(map(str, sorted(updates)))
    silent = f"{counts[SILENT]} silent differences"
    return "\n".join(
        [*rows, "", f"{len(found)} loops of {steps} steps: {said}; {silent}"]
    )


def be_quiet() -> None:
    """Let libraries say nothing but errors, and take one core."""
    torch.set_num_threads(1)
    for name in ("lightning", "lightning.pytorch", "transformers", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a row is bad."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help="words of the loops to train")
    parser.add_argument("--updates", type=int, default=30, help="optimizer steps")
    given = parser.parse_args(arguments)
    be_quiet()
    began = time.perf_counter()
    found = run(tuple(given.patterns), given.updates)
    print(table(found))
    print(f"{time.perf_counter() - began:.0f} s")
    return int(any(verdict.word in BAD for _, verdict in found))


if __name__ == "__main__":
    sys.exit(main())
