"""Ask real questions and hold each answer to what was worked out by hand.

python -m tests.situations.run                # all, about an hour of processor time
python -m tests.situations.run vit-t4 qlora   # names, or parts of names
python -m tests.situations.run --most 10      # those of at most about 10 s
"""

import argparse
import sys
from collections.abc import Sequence

from tests.situations.all_cases import all_cases
from tests.situations.answer import Answer
from tests.situations.case import Case
from tests.situations.expectation import Refused, answer_in_short, pinned_gib

RIGHT, REFUSED, WRONG = "right", "honestly refused", "WRONG"


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask what the command line asks for; return 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="names, or parts of them")
    parser.add_argument("--most", type=float, default=float("inf"), metavar="SECONDS")
    wanted = parser.parse_args(arguments)
    rows = []
    for case in all_cases():
        if _is_wanted(case.name, wanted.names) and case.seconds <= wanted.most:
            print(f"asking {case.name}", file=sys.stderr)
            rows.append(_row(case, case.answer()))
            print(f"  {' '.join(rows[-1])}", file=sys.stderr)
    rows.sort(key=lambda row: row[0] != WRONG)
    for verdict, lines in rows:
        print(f"{verdict:16}  {lines}")
    wrong = sum(verdict == WRONG for verdict, _ in rows)
    print(f"{len(rows) - wrong} of {len(rows)} right or honestly refused")
    return int(wrong > 0)


def _is_wanted(name: str, words: Sequence[str]) -> bool:
    whole = {case.name for case in all_cases()}
    return not words or any(
        name == word or (word in name and word not in whole) for word in words
    )


def _row(case: Case, answer: Answer) -> tuple[str, str]:
    problems = list(case.expects.wrong(answer))
    right = REFUSED if isinstance(case.expects, Refused) else RIGHT
    spent = f"{answer.cpu_s:.0f} CPU s, {pinned_gib(answer):.1f} GiB of the host"
    short = f"{case.name:26} {answer_in_short(answer):44}"
    lines = [f"{short} expected: {case.expects.in_short()}; {spent}"]
    lines += [f"{'':18}{problem}" for problem in problems]
    if problems:
        lines.append(f"{'':18}budgetfit {case.question}")
    return (WRONG if problems else right), "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
