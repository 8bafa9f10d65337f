"""Take the zoo through planning and training; print what works and what does not.

python -m tests.zoo.run                  # all
python -m tests.zoo.run "causal LM" T5   # families, or names that hold a word
python -m tests.zoo.run --write          # also docs/zoo.md
python -m tests.zoo.run --alternatives   # and each plan's alternatives: twice as long
python -m tests.zoo.run --stages compiled --sample 40  # blocks under torch.compile
python -m tests.zoo.run --stages sharded               # on eight GPUs under FSDP2
"""

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import torch
import transformers

from docs.answers import write
from tests.zoo.check import COMPILED, SHARDED, STAGES, Outcome, check
from tests.zoo.entry import zoo
from tests.zoo.known_failures import KNOWN_FAILURES, NOT_COMPILED, WITHOUT_BLOCKS

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
SECONDS_PER_ENTRY = 120


def main() -> int:
    """Run what the command line asks for; return 1 if something does not work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="families, or parts of names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    choices = (*STAGES, COMPILED, SHARDED)
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=choices)
    parser.add_argument("--alternatives", action="store_true", help="of each plan")
    parser.add_argument("--sample", type=int, help="as many, spread over families")
    wanted = parser.parse_args()
    names = [name for name in zoo() if is_wanted(name, wanted.words)]
    if wanted.sample:
        names.sort(key=lambda name: (zoo()[name].family, name))
        names = names[:: max(1, len(names) // wanted.sample)][: wanted.sample]
    stages = tuple(wanted.stages)
    limited = partial(_limited, stages=stages, alternatives=wanted.alternatives)
    outcomes = sorted(_outcomes(names, wanted.jobs, limited), key=_failures_first)
    for outcome in outcomes:
        passed = " ".join(
            f"{stage:8}" if stage in outcome.passed else " " * 8 for stage in stages
        )
        print(f"{outcome.name:44} {passed} {outcome.seconds:5.1f} s  {outcome.reason}")
    print(*_shares(outcomes, stages), sep="\n")
    if COMPILED in stages:
        print(*_other_than_known(outcomes), sep="\n")
    if wanted.write:
        write(PAGE, page(outcomes, stages))
    return int(any(outcome.reason for outcome in outcomes))


def is_wanted(name: str, words: Sequence[str]) -> bool:
    """Whether a name, or its family, was asked for; all are by no word."""
    family = zoo()[name].family
    return not words or any(
        word == family or word.lower() in name.lower() for word in words
    )


def _failures_first(outcome: Outcome) -> tuple[int, str, str]:
    stages = len(outcome.passed) if outcome.reason else len(STAGES)
    return stages, outcome.family, outcome.name


def _outcomes(
    names: Sequence[str], jobs: int, limited: Callable[[str], Outcome]
) -> Iterable[Outcome]:
    # Spawned: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_quiet) as pool:
        waiting = {pool.submit(limited, name): name for name in names}
        for count, future in enumerate(as_completed(waiting), 1):
            name = waiting[future]
            print(f"\r{count}/{len(names)} {name:60}", end="", file=sys.stderr)
            try:
                outcome = future.result()
                if outcome.reason:
                    print(f"\r{name:44} {outcome.reason[:300]}", file=sys.stderr)
                yield outcome
            except Exception as error:  # noqa: BLE001 - a worker that died
                reasons = {"traced": f"{type(error).__name__}: {error}"}
                yield Outcome(name, zoo()[name].family, reasons=reasons)
    print(file=sys.stderr)


def _quiet() -> None:
    torch.set_num_threads(1)
    os.environ["BUDGETFIT_CACHE"] = "off"
    transformers.utils.logging.set_verbosity_error()


def _limited(name: str, *, stages: tuple[str, ...], alternatives: bool) -> Outcome:
    """Check an entry within its time; an alarm ends Python code wherever it is.

    The time is the processor's, so that a busy machine fails nobody; one that waits for
    nothing at all ends, too.
    """

    def too_long(*_: object) -> None:
        raise TimeoutError(f"not done after {SECONDS_PER_ENTRY} s")

    signal.signal(signal.SIGPROF, too_long)
    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_ENTRY)
    signal.alarm(10 * SECONDS_PER_ENTRY)
    try:
        return check(zoo()[name], stages, alternatives=alternatives)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def _shares(outcomes: Sequence[Outcome], stages: Sequence[str]) -> list[str]:
    lines = []
    for stage in stages:
        left_out = WITHOUT_BLOCKS if stage == COMPILED else set()
        tried = [each for each in outcomes if each.name not in left_out]
        passed = sum(stage in each.passed for each in tried)
        share = passed / max(len(tried), 1)
        lines.append(f"{stage}: {passed} of {len(tried)} ({share:.1%})")
    return lines


def _other_than_known(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Say where compiled blocks do other than ``NOT_COMPILED`` says."""
    known = set().union(*NOT_COMPILED.values())
    for outcome in outcomes:
        fails = bool(outcome.reason) and outcome.name not in WITHOUT_BLOCKS
        if fails != (outcome.name in known):
            now = "is not traced" if fails else "is traced"
            yield f"{outcome.name} {now}: known_failures.py says otherwise"


def page(outcomes: Sequence[Outcome], stages: Sequence[str]) -> str:
    """Return the page of the documentation."""
    lines = [
        "# The zoo: which models work",
        "",
        "Written by `make zoo`. Every model is built small and taken through",
        "`estimate` (traced), `plan` with a batch that budgetfit makes (planned), and",
        "one real step on the CPU whose loss and gradients must equal those of plain",
        "training, with every block and with every other block recomputed (applied).",
        'Last comes `verify(device="cpu")` (verified). Model and process are compared',
        "before and after each: weights, gradients, flags, hooks, random states,",
        "default dtype and device, autocast and grad mode.",
        "",
        f"With torch {torch.__version__} and transformers {transformers.__version__}:",
        "",
        *(f"* {line}" for line in _shares(outcomes, stages)),
        "",
        *compiled_lines(outcomes),
        "",
        f"| model | task | {' | '.join(stages)} | reason |",
        f"| --- | --- | {' | '.join('---' for _ in stages)} | --- |",
    ]
    for item in outcomes:
        marks = " | ".join("yes" if stage in item.passed else "no" for stage in stages)
        reason = KNOWN_FAILURES.get(item.name) or item.reason[:300]
        reason = reason.replace("|", "\\|")
        lines.append(f"| {item.name} | {item.family} | {marks} | {reason} |")
    return "\n".join(lines) + "\n"


def compiled_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Say which models that have blocks are not traced with them compiled, and why."""
    names = {outcome.name for outcome in outcomes} - WITHOUT_BLOCKS
    failing = {why: names & known for why, known in NOT_COMPILED.items()}
    total = len(names)
    passed = total - sum(map(len, failing.values()))
    share = f"{passed} of {total} ({passed / max(total, 1):.1%})"
    command = "`python -m tests.zoo.run --stages compiled`"
    return [
        f"With each block under torch.compile, {share} are traced, by {command}. Not:",
        "",
        *(f"* {', '.join(sorted(of))}: {why}." for why, of in failing.items() if of),
    ]


if __name__ == "__main__":
    sys.exit(main())
