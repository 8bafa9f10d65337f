"""Print what recorded programs reserve after the smaller last batch of an epoch.

    python -m tests.accuracy.last_batch           # one program of each kind
    python -m tests.accuracy.last_batch 'gpt2-*'

Replays full steps, a smaller one and full ones, without a limit and within what full
steps alone reserve: how much more is it, and does memory run out? Four such sequences
are recorded, and predicted to the byte: ``last_batch_size`` in ``cases.py``.
"""

import fnmatch
import sys
from collections.abc import Iterator
from typing import NamedTuple

from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.traces.session import TraceSession
from tests.accuracy.case import Case
from tests.accuracy.cases import CASES
from tests.accuracy.predict import (
    allowed_attention,
    cudnn_attention,
    recipe_of,
    segments_of,
    subject_of,
)


class Found(NamedTuple):
    """What a case reserves after each smaller batch, and where memory runs out.

    Attributes:
        growth: By samples of the last batch, of what full steps alone reserve.
        ran_out: Samples of the last batches after which memory runs out.
    """

    growth: dict[int, float]
    ran_out: list[int]


def after_smaller(case: Case) -> Found:
    """Replay a case with last batches of several sizes.

    Raises:
        ValueError: No trace of the case holds for several batch sizes.
    """
    workload, full = subject_of(case, cudnn=False), case.batch_size
    with cudnn_attention(enabled=False), allowed_attention(case):
        trace = TraceSession(workload).affine(
            recipe_of(case, workload, segments_of(case, workload)),
            keep_own_checkpointing=case.model.settings.get("use_cache", False),
        )

    def replayed(limit: int, *then: int) -> tuple[int, bool]:
        found = replay(
            trace,
            full,
            workload.gpu,
            limit_bytes=limit,
            then_batch_sizes=then,
            micro_steps=case.gradient_accumulation_steps,
            breakdown=False,
        )
        return found.reserved_bytes, found.failed_bytes is not None

    alone, _ = replayed(UNLIMITED_BYTES)
    parts = (full // 4, full // 3, full // 2, 2 * full // 3, 3 * full // 4, full - 1)
    growth, ran_out = {}, []
    for last in sorted({n for n in (1, 2, *parts) if 0 < n < full}):
        growth[last] = replayed(UNLIMITED_BYTES, last, full, full)[0] / alone - 1
        if replayed(alone, *(last, full, full, full) * 3)[1]:
            ran_out.append(last)
    return Found(growth, ran_out)


def chosen(pattern: str) -> Iterator[Case]:
    """Yield the cases of a name, or one of each model, treatment and accumulation."""
    seen = set()
    for name in sorted(CASES):
        case = CASES[name]
        kind = case.model.name, case.checkpointing, case.gradient_accumulation_steps > 1
        if case.batch_size < 2 or case.runs_out or case.allocator:
            continue
        if fnmatch.fnmatch(name, pattern) and (pattern != "*" or kind not in seen):
            seen.add(kind)
            yield case


def main() -> None:
    """Print a line for each case, and the totals."""
    found = []
    for case in chosen(sys.argv[1] if len(sys.argv) > 1 else "*"):
        try:
            row = after_smaller(case)
        except ValueError as error:
            sys.stdout.write(f"{case.name}: {error}\n")
            continue
        found.append(row)
        worst = max(row.growth, key=lambda last: row.growth[last])
        sys.stdout.write(
            f"{row.growth[worst]:+6.2%} after {worst} of {case.batch_size}, runs out "
            f"after {row.ran_out or 'none'}  {case.name}\n"
        )
        sys.stdout.flush()
    most = sorted(max(row.growth.values()) for row in found)
    sys.stdout.write(
        f"{len(found)} programs: median {most[len(most) // 2]:+.2%}, most "
        f"{most[-1]:+.2%}; {sum(bool(row.ran_out) for row in found)} run out of memory "
        "that is limited to what full steps alone reserve\n"
    )


if __name__ == "__main__":
    main()
