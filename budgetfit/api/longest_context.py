"""``objective="length"``: the plan for the longest sequence that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from budgetfit.core.validation import check_batch, check_positive_int
from budgetfit.errors import InputError
from budgetfit.inputs.plan_request import PlanArguments
from budgetfit.planning.alternatives.longest_length import (
    FIRST_LENGTH,
    longest_plan,
    trainable_lengths,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.core.plan import Plan


def plan_longest(plan: Callable[..., Plan], asked: dict[str, Any]) -> Plan:
    """Plan for the longest sequence that fits, at batch 1 unless given.

    Args:
        plan: ``budgetfit.plan``.
        asked: Its arguments; ``max_length`` is the upper limit.

    Raises:
        InputError: The model's batch has no sequence length, or the batch is given.
        DoesNotFitError: Not even the shortest sequence fits.
    """
    for name in ("batch", "lengths"):
        if asked[name] is not None:
            raise InputError(
                f'objective="length" looks for the length itself. Leave {name}= out; '
                "max_length= says the longest of interest."
            )
    check_batch(asked["batch_size"], asked["effective_batch_size"])
    size, longest = asked["batch_size"] or 1, asked["max_length"]
    if longest is not None:
        check_positive_int("max_length", longest, example=1024)
    asked = {**asked, "batch_size": size, "objective": "throughput"}
    first = None if longest is None else min(longest, FIRST_LENGTH)
    arguments = PlanArguments.of({**asked, "max_length": first})
    lengths = trainable_lengths(arguments.workload, longest)
    length, made = longest_plan(
        lambda length: plan(**{**asked, "max_length": length}),
        arguments.need_at,
        lengths,
    )
    found = {"longest_length": length, "longest_looked_at": lengths[-1]}
    return made.changed(provenance={**made.provenance, **found})
