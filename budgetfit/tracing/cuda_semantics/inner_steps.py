"""From the registry's words for an op's memory to those of the storage log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.tracing.cuda_semantics.scratch_registry import Born, Take
from budgetfit.tracing.storage_log import ScratchRow, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.tracing.cuda_semantics.scratch_registry import InnerStep, Scratch


def rows_of(scratch: Scratch) -> list[ScratchRow]:
    """Return a row for each buffer of a request."""
    return [
        ScratchRow(scratch.rule, scratch.arguments, part)
        for part in range(scratch.parts)
    ]


def log_steps(steps: Sequence[InnerStep]) -> tuple[Step, ...]:
    """Return the steps of an op as a log follows them."""
    number: dict[Take, int] = {}
    result = []
    for step in steps:
        if isinstance(step, Take):
            number[step] = len(number)
            rows = tuple(rows_of(step.scratch))
            result.append(Step("take", number[step], rows))
        elif isinstance(step, Born):
            result.append(Step("output", step.output))
        else:
            result.append(Step("give", number[step.take]))
    return tuple(result)
