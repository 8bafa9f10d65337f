"""Explain the last out-of-memory message of a text."""

import math

from budgetfit.core.allocator.out_of_memory_message import (
    OutOfMemoryMessage,
    parse_out_of_memory,
    strip_formatting,
)
from budgetfit.errors import InputError
from budgetfit.explain.advice import find_advice
from budgetfit.explain.cause import find_cause
from budgetfit.explain.explanation import Explanation
from budgetfit.explain.failed_phase import FailedPhase, failed_phase
from budgetfit.explain.memory_breakdown import break_down_memory, breakdown_rows

_LEAST_BYTES = 2**30  # too little to plan with
_EXAMPLE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "23.65 GiB of which 1.20 GiB is free. ..."
)


def explain(text: str) -> Explanation:
    """Explain the last out-of-memory message of a traceback or a whole log, as printed.

    Raises:
        InputError: The text has no such message.
    """
    plain = strip_formatting(text)
    messages = parse_out_of_memory(plain)
    if not messages:
        size = f"{len(text):,} characters" if text.strip() else "nothing"
        raise InputError(
            f"No out-of-memory message was found in the text ({size}). Hand in what "
            f"PyTorch printed, with the traceback above it: {_EXAMPLE!r}"
        )
    # Earlier ones were caught, for example by a search for a batch size.
    telling = [message for message in messages if message.total_bytes is not None]
    message = (telling or list(messages))[-1]
    where = failed_phase(plain[: message.start])
    parts = break_down_memory(message)
    blame = find_cause(message, parts)
    return Explanation(
        message=message,
        messages=len(messages),
        where=where,
        cause=blame.cause,
        summary=blame.summary,
        missing_bytes=blame.missing_bytes,
        parts=breakdown_rows(message, parts),
        advice=find_advice(message, parts, where, blame),
        commands=_next(message, where, parts.usable_bytes),
    )


def _next(
    message: OutOfMemoryMessage, where: FailedPhase, usable_bytes: int | None
) -> tuple[str, ...]:
    """Return commands to run next: a plan for the usable memory, and ``doctor``."""
    if message.kind == "host":
        return ("budgetfit doctor",)
    size = "SIZE"
    if usable_bytes is not None and usable_bytes >= _LEAST_BYTES:
        size = f"{math.floor(usable_bytes / 2**30 * 100) / 100:.2f}GiB"
    extra = {
        "optimizer": " --optimizer adamw_bnb_8bit",
        "loading": " --method qlora",
        "to_device": " --method qlora",
    }.get(where.phase, "")
    plan = f"budgetfit plan MODEL --vram {size}"
    return tuple(dict.fromkeys((plan, plan + extra, "budgetfit doctor")))
