"""A verification as text: predicted against measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from budgetfit.core.byte_text import format_bytes, format_range
from budgetfit.reporting.layout import bullets, lines, section, table
from budgetfit.reporting.words import percent_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from budgetfit.core.plan import PhaseCheck, Verification

_COLUMNS = (
    "",
    "predicted",
    "measured",
    "prediction is off by",
)
_NO_VRAM = "VRAM was not checked"


def verification_text(check: Verification) -> RenderableType:
    """Render predicted against measured, then the gradients and the recomputation."""
    passed = check.passed
    verdict = Text(
        "PASSED" if passed else "FAILED", "bold green" if passed else "bold red"
    )
    parts = [section(_title(check), _facts(check), verdict)]
    rows = list(_peak_rows(check))
    if rows:
        parts.append(section("PEAKS", table(_COLUMNS, rows)))
    phase_rows = [_phase_row(row) for row in check.phases]
    if phase_rows:
        heading = f"{_memory(check).upper()} BY PHASE"
        parts.append(section(heading, table(_COLUMNS, phase_rows)))
    notes = [note for note in check.notes if not note.startswith(_NO_VRAM)]
    if notes:
        parts.append(section("NOTES", bullets(notes)))
    return Group(*parts)


def _title(check: Verification) -> str:
    """Only a GPU verifies a plan; the CPU checks what it can."""
    if check.device != "cpu":
        name = check.device_name or check.device
        return f"VERIFIED on {name}, {check.steps} real steps"
    name = f" ({check.device_name})" if check.device_name else ""
    return f"CHECKED on the CPU{name}, {check.steps} real steps"


def _memory(check: Verification) -> str:
    return "allocated" if check.device != "cpu" else "live bytes"


def _facts(check: Verification) -> RenderableType:
    texts = []
    if check.out_of_memory is not None:
        texts.append(f"out of memory: {check.out_of_memory}")
    if check.device == "cpu":
        texts.append(f"{_NO_VRAM}: live bytes are compared, as a CPU allocates them")
    texts += [_gradients(check), _recomputation(check)]
    return lines(texts)


def _gradients(check: Verification) -> str:
    if check.gradients_match is None:
        return "gradients: not compared"
    error = (
        f" (largest relative difference {check.max_gradient_error:.1e})"
        if check.max_gradient_error is not None
        else ""
    )
    if check.gradients_match:
        return f"gradients: as those of the unmodified model{error}"
    return f"gradients: DIFFER from those of the unmodified model{error}"


def _recomputation(check: Verification) -> str:
    planned, really = check.expected_recomputed_blocks, check.recomputed_blocks
    if planned == really:
        return f"recomputed blocks: {really}, as planned"
    return f"recomputed blocks: {really}, but {planned} were planned"


def _peak_rows(check: Verification) -> Iterable[tuple[str, ...]]:
    yield from _row(
        f"peak {_memory(check)}",
        max((row.predicted_allocated_bytes for row in check.phases), default=-1),
        max((row.measured_allocated_bytes for row in check.phases), default=-1),
    )
    yield from _row(
        "peak reserved",
        max((row.predicted_reserved_bytes for row in check.phases), default=-1),
        max((row.measured_reserved_bytes for row in check.phases), default=-1),
    )
    yield from _process_rows(check)
    if check.device != "cpu":  # the roofline is the card's
        name = "step"
        if check.time_factor != 1:
            name += f" (roofline x {check.time_factor:.2f})"
        yield from _row(name, check.predicted_step_ms, check.step_ms, write=time_text)


def _process_rows(check: Verification) -> Iterable[tuple[str, ...]]:
    """The process and what of it is the CUDA context, with the ranges expected."""
    span = check.predicted_process_range_bytes
    reserved = max((row.predicted_reserved_bytes for row in check.phases), default=0)
    process = check.predicted_process_bytes
    context = process - reserved if process is not None else None
    for name, predicted, measured, less in (
        ("peak of the process", process, check.measured_process_bytes, 0),
        ("CUDA context in it", context, check.measured_context_bytes, reserved),
    ):
        for title, text, found, off in _row(name, predicted, measured):
            if span is not None:
                low, high = (end - less for end in span)
                text = f"{text} ({format_range(low, high)})"  # noqa: PLW2901
            yield title, text, found, off


def _row(
    name: str,
    predicted: float | None,
    measured: float | None,
    write: Callable[[float], str] | None = None,
) -> Iterable[tuple[str, str, str, str]]:
    """One row, or none where nothing was measured (-1 or None)."""
    if predicted is None or measured is None or measured <= 0:
        return
    if write is None:
        texts = (format_bytes(int(predicted)), format_bytes(int(measured)))
    else:
        texts = (write(predicted), write(measured))
    yield (name, *texts, percent_text(predicted / measured - 1))


def _phase_row(row: PhaseCheck) -> tuple[str, ...]:
    measured = row.measured_allocated_bytes
    return (
        f"step {row.step + 1} {row.phase}",
        format_bytes(row.predicted_allocated_bytes),
        format_bytes(measured) if measured > 0 else "-",
        percent_text(row.predicted_allocated_bytes / measured - 1)
        if measured > 0
        else "-",
    )
