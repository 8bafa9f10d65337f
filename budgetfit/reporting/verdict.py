"""The verdict of a verification in one line: what a user came for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.reporting.phrases import percent_text
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from budgetfit.core.plan import Verification

_NEAR = 0.02


def verdict(check: Verification) -> str:
    """Return ``PASSED: ...`` or ``FAILED: ...``, with the number that decides.

    ``NOT CHECKED: ...`` where all but the gradients is right, and they cannot be told.
    """
    word = "PASSED" if check.passed else "FAILED"
    reasons = _failures(check)
    if not reasons and check.gradient_noise is not None:
        return f"NOT CHECKED: {noise_text(check.gradient_noise)}"
    if not reasons:
        return f"{word}: {_cpu(check) if check.device == 'cpu' else _cuda(check)}"
    return f"{word}: {'; '.join(reasons)}"


def noise_text(noise: float) -> str:
    """Say why gradients could not be compared."""
    return (
        "gradients of the unmodified model differ from its own, by up to "
        f"{noise:.2g} of their norm between two runs from equal seeds"
    )


def _failures(check: Verification) -> list[str]:
    """Return why it failed, the reason that ends a training first."""
    found = []
    if check.out_of_memory is not None:
        found.append(f"out of memory after {_steps(check.steps)}")
    elif check.fits is False:
        found.append(
            f"{format_bytes(check.measured_reserved_bytes)} reserved, above the "
            f"{format_bytes(check.room_bytes or 0)} that the card has for it"
        )
    if check.gradients_match is False:
        found.append("gradients differ from those of the unmodified model")
    if check.recomputed_blocks != check.expected_recomputed_blocks:
        found.append(
            f"{check.recomputed_blocks} blocks ran again, not the "
            f"{check.expected_recomputed_blocks} that were planned"
        )
    return found


def _cuda(check: Verification) -> str:
    measured = check.measured_reserved_bytes
    if measured <= 0:
        return "it ran, and its memory could not be measured"
    predicted = max(row.predicted_reserved_bytes for row in check.phases)
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
    """Say what a CPU can check, and at once what it cannot."""
    found = "steps ran" if check.gradients_match is None else "equal gradients"
    error = check.allocated_error
    if error is not None:
        near = abs(error) < _NEAR
        words = "live bytes as predicted" if near else "prediction of live bytes off"
        found += f", {words} ({percent_text(error)})"
    return f"{found}; VRAM was not checked"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
