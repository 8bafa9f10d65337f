"""Plans for samples of many lengths against each remedy for fragmented memory alone.

    python -m tests.accuracy.varying_lengths_remedies       # writes the .jsonl's rows

The plans and memory are those of ``varying_lengths.py``. Each remedy is solved for
itself and judged by the same replays of 600 updates as a plan is:

* the longest batch first, expandable segments, and batches padded to a multiple (the
  fastest that fits), each with the settings that are the fastest at the longest batch,
* less kept: the fastest settings of that batch size that fit, as budgets get smaller,
* another batch: the same at each other divisor of the effective batch size.

No GPU is needed. ``varying_lengths_table.py`` prints the rows.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
import transformers

import budgetfit
from budgetfit.core.plan import Estimate
from budgetfit.inputs.arguments import Arguments
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.search.traced_sessions import traced_sessions
from budgetfit.planning.search.varying_lengths import LengthsJudge
from budgetfit.planning.session import PlanningSession
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.accuracy.varying_lengths import DISTRIBUTIONS, EFFECTIVE, MODELS, asked_for
from tests.accuracy.varying_lengths_table import REMEDIES

MOST_SEARCHES: Final = 8  # of one batch size, in smaller budgets
LEAST_STEP_BYTES: Final = 8 << 20


class Settings(NamedTuple):
    """Settings of one batch size, and the judge of them over the lengths."""

    estimate: Estimate
    judge: LengthsJudge

    @property
    def most_samples_per_s(self) -> float:
        """The rate without padding, whether it fits or not."""
        return self.judge.samples_per_s()

    def rate(self, *measures: str, padded_to: int = 1) -> float:
        """Return samples per second with one of the measures; 0 if none fits."""
        for measure in measures:
            over = self.judge.judged(measure, padded_to).lengths
            if over is not None and over.fits:
                return over.samples_per_s
        return 0.0


def settings_of(session: PlanningSession, size: int) -> Iterator[Settings]:
    """Yield the fastest settings of a batch size, in ever smaller budgets."""
    own = session.asking(batch_size=size)
    for _ in range(MOST_SEARCHES):
        found = search_with_loss_chunks(own)
        if found.estimate is None:
            return
        steps = found.estimate.recipe.gradient_accumulation_steps
        judge = LengthsJudge(
            found.session.traces, session.budget, found.estimate, rated_steps=steps
        )
        yield Settings(found.estimate, judge)
        least = own.budget.usable_bytes - found.estimate.reserved_bytes
        less = max(least, 0) + LEAST_STEP_BYTES
        budget = replace(own.budget, headroom_bytes=own.budget.headroom_bytes + less)
        own = own.asking(budget=budget)


def remedies(session: PlanningSession) -> dict[str, float]:
    """Return the samples per second of each remedy; 0 where it does not fit."""
    sizes = [n for n in range(EFFECTIVE, 0, -1) if EFFECTIVE % n == 0]
    rows = {size: settings_of(session, size) for size in sizes}
    first: dict[int, Settings] = {}
    for size in sizes:
        if (found := next(rows[size], None)) is not None:
            first[size] = found
            fastest = max(each.estimate.samples_per_s for each in first.values())
            if found.estimate.samples_per_s < fastest / 2:
                break  # those of smaller batches are slower still
    size, best = min(first.items(), key=lambda row: session.rank(row[1].estimate))
    both = ("longest first", "expandable segments")
    rates = {name: best.rate(name) for name in both}
    padded = (
        best.rate(*both, padded_to=each) for each in session.workload.lengths.multiples
    )
    rates["padded"] = next(filter(None, padded), 0.0)
    rates["less kept"] = next(filter(None, (n.rate(*both) for n in rows[size])), 0.0)
    rates["another batch"] = 0.0
    for other in sorted(first, key=lambda n: -first[n].most_samples_per_s):
        if other == size:
            continue
        for settings in (first[other], *rows[other]):
            if settings.most_samples_per_s <= max(rates.values()):
                break
            if rate := settings.rate(*both):
                rates["another batch"] = rate
                break
    return {name: round(rate, 2) for name, rate in rates.items()}


def row_of(name: str, kind: str, gpu: str, precision: str) -> dict[str, Any]:
    """Plan, and solve each remedy; return the row of both."""
    started = time.process_time()
    with null_driver_addresses():
        given = asked_for(name, kind, gpu, precision)
        plan = budgetfit.plan(**given)
        seconds = time.process_time() - started
        asked = Arguments(**given).parsed()
        (session,) = traced_sessions(asked.workload, asked.request, **asked.settings)
        rates = remedies(session)
    over = plan.varying_lengths
    return {
        "model": name,
        "lengths": kind,
        "gpu": gpu,
        "torch": torch.__version__,
        "batch_size": plan.recipe.batch_size,
        "measure": over.measure,
        "pad_to_multiple_of": over.pad_to_multiple_of,
        "fits": over.fits,
        "samples_per_s": round(over.samples_per_s, 2),
        "remedies": rates,
        "plan_seconds": round(seconds, 1),
        "seconds": round(time.process_time() - started, 1),
    }


def main() -> int:
    """Print and write a row of each model and distribution."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument(
        "--lengths", nargs="+", default=list(DISTRIBUTIONS), choices=DISTRIBUTIONS
    )
    parser.add_argument("--gpu", default="rtx-4090")
    parser.add_argument("--precision", default="bf16-mixed")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for name in options.models:
        for kind in options.lengths:
            row = row_of(name, kind, options.gpu, options.precision)
            with REMEDIES.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(row)}\n")
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
