"""What grows in a process that plans again and again: nothing should.

``python -m tests.leaks.run --number 200`` plans, estimates, applies and undoes, and
prints what the process holds before and after. ``--leak-kib 256`` keeps so much of each
piece of work on purpose, to see that it is seen.
"""

# ruff: noqa: T201 - a program: printing is its output

import argparse
import os
import sys
import warnings

from budgetfit.traces.cache.folder import CACHE_VARIABLE
from tests.leaks.process import held, memory
from tests.leaks.work import work

# Libraries are imported, and tables of what was worked out (of calls, replays, solved
# problems) fill up: each has a bound, which so many plans reach.
WARM_UP = 160
MOST_GROWTH = 0.05


def main() -> int:
    """Run what the command line asks for; return whether something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--leak-kib", type=int, default=0)
    asked = parser.parse_args()
    os.environ[CACHE_VARIABLE] = "off"
    warnings.simplefilter("ignore")
    for number in range(WARM_UP):
        work(number)
    before, memory_before = held(), memory()
    leaked = []
    for number in range(asked.number):
        work(number)
        leaked.append(os.urandom(asked.leak_kib << 10))
        if (number + 1) % 50 == 0:
            print(f"{number + 1}: {_in_words(memory())}", flush=True)
    after, memory_after = held(), memory()
    print(f"\n{f'after {asked.number} plans':24} {'before':>12} {'after':>12}")
    for name, count in before.items():
        print(f"{name:24} {count:12,} {after[name]:12,}")
    grown = [name for name in before if after[name] > before[name]]
    for kind, size in memory_before.items():
        growth = memory_after[kind] / size - 1 if size else 0.0
        print(
            f"{f'{kind} MiB':24} {size / 2**20:12,.1f} "
            f"{memory_after[kind] / 2**20:12,.1f}   {growth:+.2%}"
        )
        if growth > MOST_GROWTH:
            grown.append(f"{kind} memory")
    print("grew: " + (", ".join(grown) or "nothing"))
    return len(grown)


def _in_words(sizes: dict[str, int]) -> str:
    return ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in sizes.items())


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
