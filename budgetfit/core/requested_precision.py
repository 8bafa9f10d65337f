"""Validate requested precision, batch sizes and objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from budgetfit.core.precision import automatic_precision, find_precision
from budgetfit.core.validation import MAX_BATCH_SIZE, MAX_SAMPLES, check_positive_int
from budgetfit.errors import InputError

if TYPE_CHECKING:
    from budgetfit.gpus.table import Gpu

OBJECTIVES = ("throughput", "batch_size", "memory", "length")


def requested_precisions(wanted: str | Sequence[str], gpu: Gpu) -> tuple[str, ...]:
    """Resolve the requested dtype policies to compare, by name.

    Raises:
        InputError: If a policy is unknown or the GPU has no hardware for it.
    """
    several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    names: Sequence[Any] = wanted if several else [wanted]
    if not names:
        raise InputError(
            'The list of precisions is empty. Use for example precision="bf16-mixed".'
        )
    found = []
    for name in names:
        policy = (
            automatic_precision(gpu.compute_capability)
            if name == "auto"
            else find_precision(name)
        )
        if policy.needs_capability > gpu.compute_capability:
            major, minor = policy.needs_capability
            have = ".".join(map(str, gpu.compute_capability))
            raise InputError(
                f"precision={policy.name!r} needs compute capability {major}.{minor}, "
                f"and {gpu.title} has {have}: it would only be emulated. "
                'Use precision="fp16-mixed".'
            )
        if policy.name not in found:
            found.append(policy.name)
    return tuple(found)


def runs_on(precision: str, gpu: Gpu) -> bool:
    """Return whether a GPU has hardware for a dtype policy."""
    return find_precision(precision).needs_capability <= gpu.compute_capability


def check_batch(batch_size: int | None, effective_batch_size: int | None) -> None:
    """Check batch sizes before anything is traced.

    Raises:
        InputError: If a size is below 1 or the micro-batch does not divide the
            effective batch.
    """
    for name, value, most in (
        ("batch_size", batch_size, MAX_SAMPLES),
        ("effective_batch_size", effective_batch_size, MAX_BATCH_SIZE),
    ):
        if value is not None:
            check_positive_int(name, value, most=most)
    if batch_size and effective_batch_size and effective_batch_size % batch_size:
        smaller = range(batch_size, 0, -1)
        divisor = next(size for size in smaller if effective_batch_size % size == 0)
        raise InputError(
            f"batch_size {batch_size} does not divide effective_batch_size "
            f"{effective_batch_size}, and the effective batch is never changed. The "
            f"next smaller one that does is {divisor}."
        )


def check_objective(objective: str) -> None:
    """Check the objective's name.

    Raises:
        InputError: If there is no such objective.
    """
    if objective not in OBJECTIVES:
        raise InputError(
            f"{objective!r} is not an objective. Use one of: {', '.join(OBJECTIVES)}."
        )
