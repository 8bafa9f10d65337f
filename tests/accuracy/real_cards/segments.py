"""Print where CUDA's driver puts a segment: below or above the earlier ones.

    python -m tests.accuracy.real_cards.segments

``segments.json`` has the addresses of segments in public recordings of real cards. Only
pairs of equal size are compared: addresses decide between free blocks of equal size.
"""

import json
import sys
from itertools import combinations
from pathlib import Path

FILE = Path(__file__).with_name("segments.json")


def below_earlier() -> dict[str, tuple[int, int]]:
    """By trace: pairs whose later segment has the lower address, and all pairs."""
    found = {}
    for trace in json.loads(FILE.read_text())["traces"]:
        pairs = [
            (first, later)
            for (size, first), (other, later) in combinations(trace["segments"], 2)
            if size == other
        ]
        found[trace["file"]] = sum(later < first for first, later in pairs), len(pairs)
    return found


def main() -> None:
    """Print one line for each trace, and the sum."""
    found = below_earlier()
    total = tuple(map(sum, zip(*found.values(), strict=True)))
    for name, (below, pairs) in [*found.items(), ("all", total)]:
        sys.stdout.write(f"{below / pairs:7.2%} of {pairs:>7,} pairs: {name}\n")


if __name__ == "__main__":
    main()
