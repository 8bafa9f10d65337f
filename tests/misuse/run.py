"""Use budgetfit wrongly in every way that is listed here.

``python -m tests.misuse.run`` prints for each wrong use what was done and what
happened, wrong answers first; words behind it choose cases by subject or name.
"""

import sys
from collections import Counter

from tests.misuse.case import SUBJECTS, Case, Outcome, all_cases, judge


def main(words: list[str]) -> None:
    """Print the table and the counts."""
    chosen = [
        case
        for case in all_cases()
        if not words or any(word in f"{case.subject}.{case.name}" for word in words)
    ]
    rows = [(case, judge(case)) for case in chosen]
    for case, outcome in sorted(rows, key=lambda row: row[1].is_right):
        print(_row(case, outcome), flush=True)
    print(_counts(rows))


def _row(case: Case, outcome: Outcome) -> str:
    expected = f"{case.kind.__name__}: {case.words}" if case.kind else "right result"
    lines = [
        f"{'ok ' if outcome.is_right else 'BAD'} {case.subject}.{case.name}",
        f"    done:     {case.did}",
        f"    happened: {outcome.happened}",
    ]
    if not outcome.is_right:
        lines.append(f"    right:    {expected}")
    return "\n".join(lines)


def _counts(rows: list[tuple[Case, Outcome]]) -> str:
    lines = ["", f"{'':22s}{'uses':>6s}{'errors':>8s}{'warnings':>10s}"]
    lines[-1] += f"{'right results':>15s}{'BAD':>6s}"
    for subject in (*SUBJECTS, "all"):
        of_it = [row for row in rows if subject in ("all", row[0].subject)]
        counts = Counter(_answer(case, outcome) for case, outcome in of_it)
        lines.append(
            f"{subject:22s}{len(of_it):6d}{counts['error']:8d}{counts['warning']:10d}"
            f"{counts['result']:15d}{counts['BAD']:6d}"
        )
    good = sum(outcome.is_right for _, outcome in rows)
    lines.append(
        f"\n{len(rows)} wrong uses: {good} clear errors, warnings or right results"
    )
    return "\n".join(lines)


def _answer(case: Case, outcome: Outcome) -> str:
    if not outcome.is_right:
        return "BAD"
    if case.kind is None:
        return "result"
    return "warning" if issubclass(case.kind, Warning) else "error"


if __name__ == "__main__":
    main(sys.argv[1:])
