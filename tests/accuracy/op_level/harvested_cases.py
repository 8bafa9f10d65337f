"""Calls that the accuracy cases' traces make, collected by ``harvest_calls.py``."""

import json
from collections.abc import Iterator
from pathlib import Path

from tests.accuracy.op_level.op_layouts import Case

HARVEST = Path(__file__).parent / "harvested_calls.json"


def harvested() -> Iterator[Case]:
    """One call of each kind that a trace made of each op."""
    yield from map(tuple, json.loads(HARVEST.read_text("utf-8")))
