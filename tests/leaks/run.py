"""What grows in a process that plans again and again: nothing should.

``python -m tests.leaks.run --number 200`` plans, estimates, applies and undoes, and
prints what the process holds before and after.
"""

# ruff: noqa: T201 - a program: printing is its output
from __future__ import annotations

import argparse
import os
import sys
import warnings

from budgetfit.planning.trace_cache import CACHE_VARIABLE
from tests.leaks.process import held, resident_bytes
from tests.leaks.work import work

# Libraries are imported, and tables of what was worked out (of calls, replays, solved
# problems) fill up: each has a bound, which so many plans reach.
WARM_UP = 160
MOST_GROWTH = 0.05


def main() -> int:
    """Run what the command line asks for; return whether something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    asked = parser.parse_args()
    os.environ[CACHE_VARIABLE] = "off"
    warnings.simplefilter("ignore")
    for number in range(WARM_UP):
        work(number)
    before, resident_before = held(), resident_bytes()
    for number in range(asked.number):
        work(number)
        if (number + 1) % 50 == 0:
            print(
                f"{number + 1}: resident {resident_bytes() / 2**20:.1f} MiB", flush=True
            )
    after, resident_after = held(), resident_bytes()
    print(f"\n{f'after {asked.number} plans':24} {'before':>12} {'after':>12}")
    for name, count in before.items():
        print(f"{name:24} {count:12,} {after[name]:12,}")
    growth = resident_after / resident_before - 1 if resident_before else 0.0
    print(
        f"{'resident MiB':24} {resident_before / 2**20:12,.1f} "
        f"{resident_after / 2**20:12,.1f}   {growth:+.2%}"
    )
    grown = [name for name in before if after[name] > before[name]]
    if growth > MOST_GROWTH:
        grown.append("resident memory")
    print("grew: " + (", ".join(grown) or "nothing"))
    return len(grown)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
