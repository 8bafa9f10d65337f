"""What a real card recorded, predicted with the torch that is installed.

    python -m tests.accuracy.on_card [--jobs 2]

``make accuracy`` compares recordings of the installed release alone; those of the card
are of another. Compiled ones are left out: their code differs by release.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.accuracy.cases import RECORDINGS
from tests.accuracy.report import result_of, section


def main() -> int:
    """Print the summary and every case, the worst first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    paths = [
        path
        for path in sorted(RECORDINGS.glob("gpu/*/*.json"))
        if "-compiled-" not in path.stem
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        summary, tables = section("gpu", list(pool.map(result_of, paths)))
    every_case = tables.partition("### Every case")[2]
    sys.stdout.write(f"{summary}\n\n### Every case{every_case}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
