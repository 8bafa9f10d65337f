"""Text report of a verification: verdict, then predicted against measured."""

import math
from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from budgetfit.core.verification import WITHOUT_COMPILE, PhaseCheck, Verification
from budgetfit.reporting.formatting import percent_text, scaled_text, time_text
from budgetfit.reporting.layout import bullets, lines, section, table
from budgetfit.utils.format_bytes import format_bytes, format_range

_COLUMNS = ("", "predicted", "measured", "prediction is off by")
_WORTH_SAYING_BYTES = 2**20
_NO_VRAM = "VRAM was not checked"
_NEAR = 0.02


def verification_text(check: Verification) -> RenderableType:
    """Render the verdict, predicted against measured values, and notes."""
    style = "bold green" if check.passed else "bold red"
    parts: list[RenderableType] = [Text(verdict_text(check), style)]
    parts.append(section(_title(check), _facts(check)))
    rows = list(_peak_rows(check))
    if rows:
        parts.append(section("PEAKS", table(_COLUMNS, rows)))
    category_rows = list(_category_rows(check))
    if category_rows:
        parts.append(section("AT THE PEAK", table(_COLUMNS, category_rows)))
    phase_rows = list(_phase_rows(check))
    if phase_rows:
        heading = f"{_memory(check).upper()} BY PHASE"
        parts.append(section(heading, table(_COLUMNS, phase_rows)))
    notes = [note for note in check.notes if not note.startswith(_NO_VRAM)]
    if notes:
        parts.append(section("NOTES", bullets(notes)))
    return Group(*parts)


def verdict_text(check: Verification) -> str:
    """Return ``PASSED: ...`` or ``FAILED: ...``, with the deciding number.

    ``NOT CHECKED: ...`` where only the gradients could not be compared.
    """
    word = "PASSED" if check.passed else "FAILED"
    reasons = _failures(check)
    if not reasons and check.gradient_noise is not None:
        return f"NOT CHECKED: {noise_text(check.gradient_noise)}"
    if not reasons:
        word += " without torch.compile" if WITHOUT_COMPILE in check.notes else ""
        return f"{word}: {_cpu(check) if check.device == 'cpu' else _cuda(check)}"
    return f"{word}: {'; '.join(reasons)}"


def noise_text(noise: float) -> str:
    """Explain why gradients could not be compared, by ``Verification``'s noise."""
    if math.isnan(noise):
        return (
            "no gradient of the unmodified model is finite, so there is nothing to "
            "compare; look for NaN in weights, batch and loss, or overflow of fp16"
        )
    return (
        "gradients of the unmodified model differ from its own, by up to "
        f"{noise:.2g} of their norm between two runs from equal seeds"
    )


def _failures(check: Verification) -> list[str]:
    """Return why it failed, the most severe reason first."""
    found = []
    if check.out_of_memory is not None:
        steps = "1 step" if check.steps == 1 else f"{check.steps} steps"
        found.append(f"out of memory after {steps}")
    elif check.fits is False:
        found.append(
            f"{format_bytes(check.measured_reserved_bytes)} reserved, above the "
            f"{format_bytes(check.room_bytes or 0)} that the card has for it"
        )
    if check.gradients_match is False:
        found.append("gradients differ from those of the unmodified model")
    if check.recomputed_as_planned is False:
        found.append(
            f"{check.recomputed_blocks} blocks ran again, not the "
            f"{check.expected_recomputed_blocks} that were planned"
        )
    return found


def _cuda(check: Verification) -> str:
    measured = check.measured_reserved_bytes
    if measured <= 0:
        return "it ran, and its memory could not be measured"
    predicted = _peak(check, "predicted_reserved_bytes")
    off = percent_text(predicted / measured - 1)
    text = (
        f"peak {format_bytes(measured)} reserved, predicted {format_bytes(predicted)} "
        f"({off})"
    )
    if check.usable_bytes is None:
        return text
    usable = format_bytes(check.usable_bytes)
    if measured <= check.usable_bytes:
        return f"{text}, fits in {usable}"
    over = format_bytes(measured - check.usable_bytes)
    return f"{text}, {over} above the planned {usable}: the headroom took it"


def _cpu(check: Verification) -> str:
    """Summarize what the CPU checked, and that VRAM was not."""
    found = "steps ran" if check.gradients_match is None else "equal gradients"
    error = check.allocated_error
    if error is not None:
        near = abs(error) < _NEAR
        text = "live bytes as predicted" if near else "prediction of live bytes off"
        found += f", {text} ({percent_text(error)})"
    return f"{found}; VRAM was not checked"


def _title(check: Verification) -> str:
    """Only a GPU verifies a plan; the CPU checks what it can."""
    if check.device != "cpu":
        name = check.device_name or check.device
        return f"VERIFIED on {name}, {_steps(check)}"
    name = f" ({check.device_name})" if check.device_name else ""
    return f"CHECKED on the CPU{name}, {_steps(check)}"


def _steps(check: Verification) -> str:
    where = " in a fresh process" if check.fresh_process else ""
    ranks = f" on each of {check.ranks} ranks" if check.ranks > 1 else ""
    return f"{check.steps} real steps{where}{ranks}"


def _memory(check: Verification) -> str:
    return "allocated" if check.device != "cpu" else "live bytes"


def _facts(check: Verification) -> RenderableType:
    texts = []
    if check.out_of_memory is not None:
        texts.append(f"out of memory: {check.out_of_memory}")
    if check.device == "cpu":
        compared = ": live bytes are compared, as a CPU allocates them"
        texts.append(f"{_NO_VRAM}{compared if check.phases else ''}")
    texts += [_gradients(check), _recomputation(check)]
    if check.shorter_batches:
        texts.append(_shorter(check))
    texts += list(_host(check))
    return lines(texts)


def _shorter(check: Verification) -> str:
    """Report whether shorter batches reserved more memory than the longest."""
    count = check.shorter_batches
    many = "1 shorter batch" if count == 1 else f"{count} shorter batches"
    if check.shorter_reserved_bytes < 0:
        return f"then {many}: ran"
    peak = max((row.measured_reserved_bytes for row in check.phases), default=0)
    more = check.shorter_reserved_bytes - peak
    if more <= 0:
        return f"then {many}: nothing more was reserved"
    return f"then {many}: {format_bytes(more)} more were reserved"


def _host(check: Verification) -> Iterable[str]:
    """Report pinned host memory and the growth of the process."""
    pinned = check.measured_pinned_bytes
    if check.predicted_pinned_bytes or (pinned or 0) >= _WORTH_SAYING_BYTES:
        found = "not measured" if pinned is None else format_bytes(pinned)
        predicted = format_bytes(check.predicted_pinned_bytes)
        yield f"pinned host memory: {found}, predicted {predicted}"
    growth = check.host_growth_bytes
    if growth is not None and check.device != "cpu":
        # On the CPU this is the model's own memory, which is compared below.
        yield f"host memory of the process: {format_bytes(max(growth, 0))} more"


def _gradients(check: Verification) -> str:
    if check.gradient_noise is not None:
        advice = "; look for a counter, a cache or a generator that no seed reaches"
        text = noise_text(check.gradient_noise)
        return (
            f"gradients: not checked, {text}"
            f"{'' if math.isnan(check.gradient_noise) else advice}"
        )
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
    if check.recomputed_as_planned is None:
        return f"recomputed blocks: not watched, {planned} are planned"
    if planned == really:
        return f"recomputed blocks: {really}, as planned"
    return f"recomputed blocks: {really}, but {planned} were planned"


def _peak_rows(check: Verification) -> Iterable[tuple[str, ...]]:
    for name, kind in ((_memory(check), "allocated"), ("reserved", "reserved")):
        predicted = _peak(check, f"predicted_{kind}_bytes")
        yield from _row(
            f"peak {name}", predicted, _peak(check, f"measured_{kind}_bytes")
        )
    yield from _process_rows(check)
    if check.device != "cpu":  # the prediction is the GPU's
        name = f"steady step{scaled_text(check.time_factor)}"
        yield from _row(name, check.predicted_step_ms, check.step_ms, write=time_text)
        if check.first_step_ms is not None and check.steps > 1:
            yield "first step", "", time_text(check.first_step_ms), ""


def _peak(check: Verification, field: str) -> int:
    """Return the maximum of a field over all steps and phases; -1 without any."""
    return max((getattr(row, field) for row in check.phases), default=-1)


def _process_rows(check: Verification) -> Iterable[tuple[str, ...]]:
    """Peak of the process and its CUDA context, with expected ranges."""
    span = check.predicted_process_range_bytes
    reserved = max((row.predicted_reserved_bytes for row in check.phases), default=0)
    process = check.predicted_process_bytes
    context = process - reserved if process is not None else None
    for name, predicted, measured, less in (
        ("peak of the process", process, check.measured_process_bytes, 0),
        ("CUDA context in it", context, check.measured_context_bytes, reserved),
    ):
        among = f" ({format_range(*(end - less for end in span))})" if span else ""
        for title, text, found, off in _row(name, predicted, measured):
            yield title, f"{text}{among}", found, off


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


def _category_rows(check: Verification) -> Iterable[tuple[str, ...]]:
    for row in check.categories:
        name = row.name.replace("_", " ")
        if row.measured_bytes > 0:
            yield from _row(name, row.predicted_bytes, row.measured_bytes)
        else:
            yield name, format_bytes(row.predicted_bytes), "0 B", "-"


def _phase_rows(check: Verification) -> Iterable[tuple[str, ...]]:
    """The first step, which allocates states, and the peak of later steps."""
    first = [row for row in check.phases if row.step == 0]
    steady = [row for row in check.phases if row.step > 0]
    for row in first:
        yield _phase_row(f"first step {row.phase}", [row])
    for phase in dict.fromkeys(row.phase for row in steady):
        same = [row for row in steady if row.phase == phase]
        yield _phase_row(f"steady {phase}", same)


def _phase_row(name: str, rows: list[PhaseCheck]) -> tuple[str, ...]:
    predicted = max(row.predicted_allocated_bytes for row in rows)
    measured = max(row.measured_allocated_bytes for row in rows)
    return (
        name,
        format_bytes(predicted),
        format_bytes(measured) if measured > 0 else "-",
        percent_text(predicted / measured - 1) if measured > 0 else "-",
    )
