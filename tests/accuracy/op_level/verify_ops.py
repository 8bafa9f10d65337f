"""Which aten ops the recordings prove, as the list that the package carries.

    python -m tests.accuracy.op_level.verify_ops           # writes verified_ops.txt
    python -m tests.accuracy.op_level.verify_ops --traces  # ops of all cases' traces
    python -m tests.accuracy.op_level.verify_ops --odd     # odd calls, by op

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
from budgetfit.tracing.cuda.kernel_memory.registry import verified_ops
from tests.accuracy.op_level.compare import card_of, imitation, matches, recording
from tests.accuracy.op_level.harvested_cases import HARVEST
from tests.accuracy.op_level.op_call import op_named
from tests.accuracy.op_level.op_families import ODD
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
    """What was compared of one op; ``example``: a call that is wrong."""

    calls: int = 0
    comparisons: int = 0
    wrong: int = 0
    wrong_calls: int = 0
    not_covered: int = 0
    example: str = ""
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


def proofs(pattern: str = "*") -> dict[str, Proof]:
    """Compare every call of some recordings with its prediction, by op."""
    result: dict[str, Proof] = defaultdict(Proof)
    with imitation():
        for path in sorted(RECORDINGS.glob(f"{pattern}.json")):
            _compare(path, result)
    return result


def _compare(path: Path, result: dict[str, Proof]) -> None:
    cards = {name: card_of(row) for name, row in recording(path)["cards"].items()}
    for case in recording(path)["cases"]:
        proof = result[full_name(case[0])]
        fits = matches(case, cards)
        recorded = any(requests is not None for requests in case[3].values())
        proof.not_covered += recorded and not fits
        proof.wrong_calls += not all(fits.values())
        proof.calls += bool(fits)
        proof.comparisons += len(fits)
        proof.wrong += sum(not fit for fit in fits.values())
        if not all(fits.values()):
            proof.example = f"{path.stem}: {case[:3]}"
        proof.capabilities |= {cards[name].compute_capability for name in fits}


def listing(found: dict[str, Proof]) -> str:
    """Return the text of ``verified_ops.txt`` for what was found of all recordings."""
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
        for op, proof in sorted(found.items())
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


def print_odd_calls() -> None:
    """Print how many odd calls were tried, and what is predicted wrong, worst first."""
    by_op: dict[str, Proof] = defaultdict(Proof)
    for family in ODD:
        for op, proof in proofs(family).items():
            total = by_op[op]
            total.calls += proof.calls
            total.comparisons += proof.comparisons
            total.wrong_calls += proof.wrong_calls
            total.not_covered += proof.not_covered
    listed = verified_ops()
    for op, proof in sorted(by_op.items(), key=lambda row: -row[1].wrong_calls):
        if proof.wrong_calls or proof.not_covered:
            print(
                f"{op:50} {proof.wrong_calls:3} wrong, {proof.not_covered:3} named as "
                f"not verified, of {proof.calls + proof.not_covered}"
                f"{'' if op in listed else '; not on the list'}"
            )
    for title, rows in (
        ("on the verified list", [by_op[op] for op in by_op if op in listed]),
        ("on no list", [by_op[op] for op in by_op if op not in listed]),
    ):
        print(
            f"{len(rows)} ops {title}: {sum(p.calls for p in rows)} odd calls compared "
            f"({sum(p.comparisons for p in rows)} comparisons on cards), "
            f"{sum(p.wrong_calls for p in rows)} wrong; "
            f"{sum(p.not_covered for p in rows)} named as not verified"
        )


def main() -> None:
    """Write the list, or print what the traces hold or how odd calls fare."""
    parser = argparse.ArgumentParser(description="Which ops are verified.")
    parser.add_argument("--traces", action="store_true")
    parser.add_argument("--odd", action="store_true")
    options = parser.parse_args()
    if options.odd:
        print_odd_calls()
        return
    if not options.traces:
        VERIFIED.write_text(listing(proofs()), "utf-8")
        return
    rows = list(traced_ops())
    for op, state in rows:
        print(f"{op:60} {state}")
    missing = sum(state == "UNVERIFIED" for _, state in rows)
    print(f"{len(rows)} ops in the traces of all cases, {missing} not verified")


if __name__ == "__main__":
    main()
