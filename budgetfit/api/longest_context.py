"""``objective="length"``: the plan for the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from budgetfit.core.plan import Plan
from budgetfit.core.validation import check_batch, check_positive_int
from budgetfit.errors import InputError
from budgetfit.planning.alternatives.longest_length import (
    FIRST_LENGTH,
    longest_plan,
    trainable_lengths,
)

if TYPE_CHECKING:
    from budgetfit.inputs.arguments import Arguments


def plan_longest(plan: Callable[[Arguments], Plan], given: Arguments) -> Plan:
    """Plan for the longest sequence that fits, at batch 1 unless given.

    ``max_length`` of ``given`` is the upper limit.

    Raises:
        InputError: The model's batch has no sequence length, or the batch is given.
        DoesNotFitError: Not even the shortest sequence fits.
    """
    for name in ("batch", "lengths", "image_sizes"):
        if getattr(given, name) is not None:
            raise InputError(
                f'objective="length" looks for the length itself. Leave {name}= out; '
                "max_length= says the longest of interest."
            )
    if given.compile == "model":
        raise InputError(
            "objective='length' looks at many lengths, and compile='model' takes a "
            "minute for each. Use compile='blocks' or 'none'."
        )
    check_batch(given.batch_size, given.effective_batch_size)
    longest = given.max_length
    if longest is not None:
        check_positive_int("max_length", longest, example=1024)
    given = replace(given, batch_size=given.batch_size or 1, objective="throughput")
    first = None if longest is None else min(longest, FIRST_LENGTH)
    asked = replace(given, max_length=first).parsed()
    lengths = trainable_lengths(asked.workload, longest)
    length, made = longest_plan(
        lambda length: plan(replace(given, max_length=length)), asked.need_at, lengths
    )
    found = {"longest_length": length, "longest_looked_at": lengths[-1]}
    return made.changed(provenance={**made.provenance, **found})
