"""Which aten ops the recordings prove, as the list that the package carries.

    python -m tests.accuracy.op_level.verify_ops           # writes verified_ops.txt
    python -m tests.accuracy.op_level.verify_ops --traces  # ops of all cases' traces

An op is verified when enough different calls of it were recorded on enough
architectures and every one of them is predicted to the byte. ``--traces`` reads the
ops in ``harvested_calls.json``, which every op of the cases' traces is in.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from budgetfit.tracing.cuda import kernel_memory
from tests.accuracy.op_level.compare import card_of, imitation, matches, recording
from tests.accuracy.op_level.harvested_cases import HARVEST
from tests.accuracy.op_level.op_call import op_named
from tests.accuracy.op_level.record_ops import RECORDINGS

VERIFIED: Final = Path(kernel_memory.__file__).parent / "verified_ops.txt"
LEAST_CALLS: Final = 3  # that differ
LEAST_CAPABILITIES: Final = 4
HEADER: Final = """\
# aten ops whose allocations were compared, call by call and byte for byte, with those
# that PyTorch {torch}'s own CUDA host code makes, on compute capabilities
# {capabilities}.
# Made by: python -m tests.accuracy.op_level.verify_ops
# Op, calls that differ, comparisons on all cards.
"""


@dataclass
class Proof:
    """What was compared of one op."""

    calls: int = 0
    comparisons: int = 0
    wrong: int = 0
    capabilities: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def holds(self) -> bool:
        """Whether the op is verified."""
        return (
            not self.wrong
            and self.calls >= LEAST_CALLS
            and len(self.capabilities) >= LEAST_CAPABILITIES
        )


def full_name(op: str) -> str:
    """Return ``mm.default`` for ``mm``."""
    return str(op_named(op)).removeprefix("aten.")


def proofs() -> dict[str, Proof]:
    """Compare every recorded call with its prediction, by op."""
    result: dict[str, Proof] = defaultdict(Proof)
    with imitation():
        for path in sorted(RECORDINGS.glob("*.json")):
            _compare(path, result)
    return result


def _compare(path: Path, result: dict[str, Proof]) -> None:
    cards = {name: card_of(row) for name, row in recording(path)["cards"].items()}
    for case in recording(path)["cases"]:
        proof = result[full_name(case[0])]
        fits = matches(case, cards)
        proof.calls += bool(fits)
        proof.comparisons += len(fits)
        proof.wrong += sum(not fit for fit in fits.values())
        proof.capabilities |= {cards[name].compute_capability for name in fits}


def listing() -> str:
    """Return the text of ``verified_ops.txt``."""
    cards = [
        card
        for path in sorted(RECORDINGS.glob("*.json"))
        for card in recording(path)["cards"].values()
    ]
    capabilities = sorted({tuple(card["compute_capability"]) for card in cards})
    header = HEADER.format(
        torch=", ".join(sorted({card["torch"].partition("+")[0] for card in cards})),
        capabilities=", ".join(f"{major}.{minor}" for major, minor in capabilities),
    )
    rows = [
        f"{op} {proof.calls} {proof.comparisons}\n"
        for op, proof in sorted(proofs().items())
        if proof.holds
    ]
    return header + "".join(rows)


def traced_ops() -> Iterator[tuple[str, str]]:
    """Yield every op of the cases' traces and what is known of it."""
    verified = {
        line.split()[0]
        for line in VERIFIED.read_text("utf-8").splitlines()
        if not line.startswith("#")
    }
    for op in sorted({call[0] for call in json.loads(HARVEST.read_text("utf-8"))}):
        if op in verified:
            yield op, "verified"
        elif op_named(op).is_view:
            yield op, "a view: allocates nothing"
        else:
            yield op, "UNVERIFIED"


def main() -> None:
    """Write the list, or print what the traces hold."""
    parser = argparse.ArgumentParser(description="Which ops are verified.")
    parser.add_argument("--traces", action="store_true")
    if not parser.parse_args().traces:
        VERIFIED.write_text(listing(), "utf-8")
        return
    rows = list(traced_ops())
    for op, state in rows:
        print(f"{op:60} {state}")
    missing = sum(state == "UNVERIFIED" for _, state in rows)
    print(f"{len(rows)} ops in the traces of all cases, {missing} not verified")


if __name__ == "__main__":
    main()
