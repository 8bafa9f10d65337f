"""How long tests take, so that a few minutes' worth of them can be chosen.

    python -m pytest --junitxml suite.xml        # all tests, by one process per core
    python -m tests.durations suite.xml          # writes tests/durations.json

Of several runs the highest mean counts: in a run of some tests alone, the first of them
makes the traces that all share.

``pytest --within 120`` then runs the cheapest tests that take 120 seconds of processor
time together; those that are not in the file, new ones, always run.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

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


def means(xml: Path) -> Counter[str]:
    """Return the mean seconds of one test of each function of a run."""
    seconds, tests = Counter[str](), Counter[str]()
    for case in ET.parse(xml).iter("testcase"):
        if len(case):
            continue  # it failed or was skipped, and says nothing
        place = case.attrib["classname"].replace(".Test", "::Test").replace(".", "/")
        function = f"{place}::{case.attrib['name'].split('[', 1)[0]}"
        seconds[function] += float(case.attrib["time"])
        tests[function] += 1
    return Counter({name: seconds[name] / tests[name] for name in tests})


def main() -> None:
    """Write the means of one run or, where there are several, the highest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("xml", type=Path, nargs="+")
    highest = Counter[str]()
    for xml in parser.parse_args().xml:
        highest |= means(xml)
    long = {
        name: round(mean, 2)
        for name, mean in sorted(highest.items())
        if mean >= SHORTEST_S
    }
    short = [mean for mean in highest.values() if mean < SHORTEST_S]
    long[OTHERS] = round(sum(short) / max(1, len(short)), 4)
    FILE.write_text(json.dumps(long, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
