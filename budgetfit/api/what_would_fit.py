"""Suggestions where nothing fits: another method, a shorter sequence, a larger GPU."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from budgetfit.errors import DoesNotFitError, InputError, Suggestion, TraceError
from budgetfit.gpus.table import all_gpus
from budgetfit.inputs.arguments import ParsedArguments
from budgetfit.planning.alternatives.longest_length import (
    FIRST_LENGTH,
    longest_that_fits,
    thinned_lengths,
    trainable_lengths,
)
from budgetfit.planning.alternatives.refusal import (
    Change,
    least_weights_bytes,
    suggestion,
)
from budgetfit.planning.search.lowest_peak import LowestPeak


def what_would_fit(asked: ParsedArguments, error: DoesNotFitError) -> Iterator[Change]:
    """Yield changes of the arguments with which a plan may fit."""
    for arguments in _changes(asked, error):
        # LoRA and QLoRA are asked for apart.
        name = arguments.get("method") or next(iter(arguments))
        yield Change(name, partial(_solved, asked, arguments))
    # Shorter samples make a smaller batch, but no smaller weights.
    least_bytes = error.floor_bytes - error.batch_bytes
    if asked.lengths is None and least_bytes <= error.usable_bytes:
        yield Change("max_length", partial(_shorter, asked, error))


def _solved(asked: ParsedArguments, arguments: dict[str, Any]) -> Suggestion | None:
    """Return the suggestion of changed arguments; None if they do not fit."""
    like = asked if "gpu" in arguments else None
    try:
        there = replace(asked.given, **arguments).parsed(like=like)
        if "prepare_for_kbit" in arguments:  # other dtypes in the same blocks
            there = replace(there, depth_checks=asked.depth_checks)
        weights_bytes = least_weights_bytes(there.workload.model)
        sharded = any(each.engine != "ddp" for each in there.parallelisms)
        if not sharded and weights_bytes > there.budget.usable_bytes:
            return None
        found = there.least().estimate
    except (InputError, TraceError):
        return None  # the model cannot be trained that way
    return suggestion(arguments, found) if found is not None and found.fits else None


def _shorter(asked: ParsedArguments, error: DoesNotFitError) -> Suggestion | None:
    """Return about the longest sequence that fits; None without a length."""
    # Often even the shortest does not fit.
    tried: dict[int, LowestPeak] = {}

    def need_at(length: int) -> LowestPeak:
        tried[length] = asked.need_at(length)
        return tried[length]

    needed, usable = error.needed_bytes, error.usable_bytes
    try:
        lengths = trainable_lengths(asked.workload)
        this = asked.given.max_length or min(FIRST_LENGTH, lengths[-1])
        shortest, *longer = thinned_lengths([n for n in lengths if n < this]) or [this]
        if shortest == this or not need_at(shortest).fits:
            return None
        known = [
            (shortest, tried[shortest]),
            (this, LowestPeak(needed, usable, fits=False)),
        ]
        length = longest_that_fits(need_at, longer, known=known) or shortest
    except (InputError, TraceError):
        return None
    found = tried[length].estimate
    return None if found is None else suggestion({"max_length": length}, found)


def _changes(
    asked: ParsedArguments, error: DoesNotFitError
) -> Iterator[dict[str, Any]]:
    given, target = asked.given, asked.target
    if given.method != "qlora" and given.quantization is None:
        yield {"method": "qlora"}
    elif given.prepare_for_kbit:
        yield {"prepare_for_kbit": False}
    larger = [
        gpu
        for gpu in all_gpus()
        if gpu.compute_capability >= target.gpu.compute_capability
        and target.on(gpu).budget(given.headroom).usable_bytes >= error.needed_bytes
    ]
    if larger:
        name = min(larger, key=lambda gpu: gpu.total_bytes).name
        yield {"gpu": name, **({} if given.vram is None else {"vram": None})}
