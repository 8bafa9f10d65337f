"""From the registry's words for an op's memory to those of the storage log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.tracing.cuda.kernel_memory.registry import Born, Product, Take
from budgetfit.tracing.records import ScratchRow, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from budgetfit.tracing.cuda.kernel_memory.registry import InnerStep, Scratch


def rows_of(scratch: Scratch) -> list[ScratchRow]:
    """Return a row for each buffer of a request."""
    return [
        ScratchRow(scratch.rule, scratch.arguments, part)
        for part in range(scratch.parts)
    ]


def log_steps(
    steps: Sequence[InnerStep],
    workspace: Sequence[ScratchRow] = (),
    lasting: Sequence[ScratchRow] = (),
) -> tuple[Step, ...]:
    """Return the steps of an op as a log follows them.

    ``workspace`` is what each matrix product takes and gives back, ``lasting`` what the
    first one takes for good.
    """
    number: dict[InnerStep, int] = {}
    result = []
    for step in steps:
        if isinstance(step, Take):
            number[step] = len(number)
            rows = tuple(rows_of(step.scratch))
            result.append(Step("take", number[step], rows))
        elif isinstance(step, Product):
            if lasting:
                result.append(Step("keep", 0, tuple(lasting)))
                lasting = ()
            if workspace:
                number[step] = len(number)
                result.append(Step("take", number[step], tuple(workspace)))
                result.append(Step("give", number[step]))
        elif isinstance(step, Born):
            result.append(Step("output", step.output))
        else:
            result.append(Step("give", number[step.take]))
    return tuple(result)
