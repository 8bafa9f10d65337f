"""Suggestions where nothing fits: another method, a shorter sequence, a larger GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from budgetfit.errors import InputError, TraceError
from budgetfit.gpus.table import all_gpus
from budgetfit.inputs.plan_request import PlanArguments
from budgetfit.inputs.settings import find_target_gpu
from budgetfit.planning.alternatives.longest_length import (
    FIRST_LENGTH,
    MemoryNeed,
    longest_that_fits,
    thinned_lengths,
    trainable_lengths,
)
from budgetfit.planning.alternatives.refusal import suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from budgetfit.errors import DoesNotFitError, Suggestion

Arguments = dict[str, Any]  # of ``plan``, by name


def what_would_fit(
    given: Mapping[str, Any], asked: PlanArguments, error: DoesNotFitError
) -> Iterator[Suggestion]:
    """Yield changes of the arguments with which a plan fits, each evaluated.

    Args:
        given: All arguments of ``plan``.
        asked: The same, parsed.
        error: Why nothing fits.
    """
    for change in _changes(given, error):
        try:
            found = PlanArguments.of({**given, **change}).least().estimate
        except (InputError, TraceError):
            continue  # the model cannot be trained that way
        if found is not None and found.fits:
            yield suggestion(change, found)
    if given["lengths"] is None and not error.proven:
        yield from _shorter(given, asked, error)


def _shorter(
    given: Mapping[str, Any], asked: PlanArguments, error: DoesNotFitError
) -> Iterator[Suggestion]:
    """Yield about the longest sequence that fits; nothing if the batch has no length.

    The shortest is tried first: often even that does not fit.
    """
    tried: dict[int, MemoryNeed] = {}

    def need_at(length: int) -> MemoryNeed:
        tried[length] = asked.need_at(length)
        return tried[length]

    needed, usable = error.needed_bytes, error.usable_bytes
    try:
        lengths = trainable_lengths(asked.workload)
        this = given["max_length"] or min(FIRST_LENGTH, lengths[-1])
        shortest, *longer = thinned_lengths([n for n in lengths if n < this]) or [this]
        if shortest == this or not need_at(shortest).fits:
            return
        known = [
            (shortest, tried[shortest]),
            (this, MemoryNeed(needed, usable, fits=False)),
        ]
        length = longest_that_fits(need_at, longer, known=known) or shortest
    except (InputError, TraceError):
        return
    found = tried[length].estimate
    if found is not None:
        yield suggestion({"max_length": length}, found)


def _changes(given: Mapping[str, Any], error: DoesNotFitError) -> Iterator[Arguments]:
    method, quantization = given["method"], given["quantization"]
    if method != "qlora" and quantization is None:
        yield {"method": "qlora"}
    elif given["prepare_for_kbit"]:
        yield {"prepare_for_kbit": False}
    target = find_target_gpu(given["vram"], given["gpu"])
    larger = [
        gpu
        for gpu in all_gpus()
        if gpu.compute_capability >= target.gpu.compute_capability
        and target.on(gpu).budget(given["headroom"]).usable_bytes >= error.needed_bytes
    ]
    if larger:
        yield {"gpu": min(larger, key=lambda gpu: gpu.total_bytes).name, "vram": None}
