"""How long tests take, so that a few minutes' worth of them can be chosen.

    python -m pytest --junitxml suite.xml        # all tests, by one process per core
    python -m tests.durations suite.xml          # writes tests/durations.json

``pytest --within 120`` then runs the cheapest tests that take 120 seconds of processor
time together; those that are not in the file, new ones, always run.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE: Final = Path(__file__).with_name("durations.json")
SHORTEST_S: Final = 0.05  # shorter ones are one line of the file
OTHERS: Final = "all others"


def function_of(node_id: str) -> str:
    """Return a test's file and function, for all its parameters together."""
    return node_id.split("[", 1)[0].replace(".py::", "::")


def read() -> dict[str, float]:
    """Return the mean seconds of one test, of each function and of all others."""
    found: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def chosen(node_ids: Iterable[str], within_s: float) -> set[str]:
    """Return the functions whose tests run: the cheapest that last ``within_s``."""
    known = read()
    tests = Counter(map(function_of, node_ids))
    functions = tests.keys() - known.keys()
    total = known[OTHERS] * sum(tests[function] for function in functions)
    for function in sorted(
        tests.keys() & known.keys(), key=lambda each: (known[each], each)
    ):  # by name where equal: each worker chooses for itself
        total += tests[function] * known[function]
        if total > within_s:
            break
        functions.add(function)
    return functions


def main() -> None:
    """Write the means of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("xml", type=Path)
    seconds, tests = Counter[str](), Counter[str]()
    for case in ET.parse(parser.parse_args().xml).iter("testcase"):  # noqa: S314 - pytest's
        place = case.attrib["classname"].replace(".", "/")
        function = f"{place}::{case.attrib['name'].split('[', 1)[0]}"
        seconds[function] += float(case.attrib["time"])
        tests[function] += 1
    means = {name: round(seconds[name] / tests[name], 2) for name in sorted(tests)}
    long = {name: mean for name, mean in means.items() if mean >= SHORTEST_S}
    others = tests.keys() - long.keys()
    total = sum(seconds[name] for name in others)
    long[OTHERS] = round(total / sum(tests[name] for name in others), 4)
    FILE.write_text(json.dumps(long, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
