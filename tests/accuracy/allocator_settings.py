"""Predictions under allocator settings, beside the same programs without.

    python -m tests.accuracy.allocator_settings

Prints the section of docs/accuracy.md, which ``report.py`` puts there.
``record_allocator_settings.py`` says what was recorded.
"""

import json
import statistics
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.step_trace import StepTrace
from budgetfit.gpus.table import Gpu
from budgetfit.memory.replay import replay
from budgetfit.traces.session import TraceSession
from tests.accuracy.case import STEPS
from tests.accuracy.cases import case_named
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.accuracy.predict import recipe_of, segments_of, subject_of
from tests.accuracy.record_allocator_settings import (
    COMBINATIONS,
    PROGRAMS,
    RECORDED,
    ROOM,
)
from tests.accuracy.training import allowed_attention


@dataclass(frozen=True)
class Compared:
    """Peaks of one program under some settings, in bytes; errors are signed."""

    program: str
    settings: str
    predicted: tuple[int, int]
    recorded: tuple[int, int]

    @property
    def errors(self) -> tuple[float, float]:
        """Of allocated and of reserved bytes: above zero means predicted too much."""
        allocated, reserved = (
            predicted / recorded - 1
            for predicted, recorded in zip(self.predicted, self.recorded, strict=True)
        )
        return allocated, reserved


@cache
def traced(program: str) -> tuple[StepTrace, Gpu]:
    """The trace of a program, which its settings do not change."""
    case = case_named(program)
    workload = subject_of(case, cudnn=False)
    session = TraceSession(workload)
    look_up = session.affine if case.last_batch_size else session.exact
    with allowed_attention(case):
        trace = look_up(recipe_of(case, workload, segments_of(case, workload)))
    return trace, workload.gpu


@null_driver_addresses()
def compare(program: str, settings: str, recorded: dict[str, int]) -> Compared:
    """Predict a program's peaks under settings."""
    case = case_named(program)
    trace, gpu = traced(program)
    if recorded["memory"]:
        gpu = replace(gpu, total_bytes=recorded["memory"])
    timeline = replay(
        trace,
        case.batch_size,
        gpu,
        settings=AllocatorSettings.parse(settings),
        then_batch_sizes=case.batch_sizes[2:] if case.last_batch_size else (),
    )
    then = len(case.batch_sizes[2:]) if case.last_batch_size else 0
    # Where garbage is collected more steps are played than were recorded.
    unrecorded = range(STEPS, timeline.points[-1].step + 1 - then)
    steps = [
        point
        for point in timeline.points
        if point.phase != "setup" and point.step not in unrecorded
    ]
    return Compared(
        program=program,
        settings=settings,
        predicted=(
            max(point.allocated_bytes for point in steps),
            max(point.reserved_bytes for point in steps),
        ),
        recorded=(recorded["allocated"], recorded["reserved"]),
    )


def recorded_rows() -> Iterator[tuple[str, str, dict[str, int]]]:
    """Each recorded program with its settings."""
    rows = json.loads(RECORDED.read_text("utf-8"))
    for program, by_settings in rows.items():
        for settings, recorded in by_settings.items():
            yield program, settings, recorded


def compare_all() -> list[Compared]:
    """Every recorded program under all settings."""
    return [compare(*row) for row in recorded_rows()]


# -- text -----------------------------------------------------------------------------

_COLUMNS: Final = (
    *("settings", "programs", "allocated, median", "worst"),
    *("reserved, median", "worst", "recorded reserved beside none"),
)
_HEADER: Final = f"| {' | '.join(_COLUMNS)} |\n|---{'|---:' * (len(_COLUMNS) - 1)}|"


def _worst(errors: list[float]) -> float:
    return max(errors, key=abs)


def _row(title: str, rows: list[Compared], without: dict[str, Compared]) -> str:
    allocated, reserved = ([row.errors[part] for row in rows] for part in (0, 1))
    beside = [row.recorded[1] / without[row.program].recorded[1] - 1 for row in rows]
    figures = (
        statistics.median(allocated),
        _worst(allocated),
        statistics.median(reserved),
        _worst(reserved),
    )
    cells = " | ".join(f"{100 * figure:+.3f} %" for figure in figures)
    span = f"{100 * min(beside):+.1f} to {100 * max(beside):+.1f} %"
    return f"| {title} | {len(rows)} | {cells} | {span} |"


def section() -> str:
    """The section of docs/accuracy.md: errors by settings, the worst first."""
    rows = compare_all()
    without = {row.program: row for row in rows if not row.settings}
    groups = {
        settings: [row for row in rows if row.settings == settings]
        for settings in COMBINATIONS
    }
    by_error = sorted(
        groups.items(),
        key=lambda item: -max(abs(error) for row in item[1] for error in row.errors),
    )
    chosen = [row for row in rows if row.settings]
    exact = sum(row.predicted[1] == row.recorded[1] for row in chosen)
    text = (
        f"{len(PROGRAMS)} of the programs above under {len(COMBINATIONS)} settings of "
        "`PYTORCH_ALLOC_CONF`, on the null driver: reserved is equal to the byte in "
        f"{exact} of {len(chosen)}. The last column is what the settings change. "
        f"Garbage is collected on a card of {ROOM:g} times what the program reserves "
        "without settings; there a replay plays more full steps before a smaller batch "
        "than were recorded. `python -m tests.accuracy.allocator_settings` prints this."
    )
    lines = [
        "## Allocator settings\n",
        *textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False),
        "",
        _HEADER,
        *(_row(f"`{text}`", members, without) for text, members in by_error),
        _row("all of them", chosen, without),
        _row("none", list(without.values()), without),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{section()}\n")
