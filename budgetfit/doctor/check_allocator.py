"""Check the settings of PyTorch's caching allocator (``PYTORCH_ALLOC_CONF``)."""

from collections.abc import Iterator, Mapping
from typing import Final

from budgetfit.doctor.facts import Finding, Machine, note, ok, problem
from budgetfit.doctor.parse_allocator_settings import (
    NAMES,
    mistyped_names,
    read_settings,
)

_TOPIC: Final = "allocator"
_NEW: Final = NAMES[2]


def check_allocator(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the allocator's environment variables."""
    for wrong, right in mistyped_names(machine.environment):
        yield problem(
            _TOPIC,
            f"{wrong} is no variable that PyTorch reads: did you mean {right}?",
            f"export {right}=${wrong}; unset {wrong}",
        )
    given = {n: machine.environment[n] for n in NAMES if n in machine.environment}
    if not machine.torch.hip:  # read by ROCm builds only
        given.pop(NAMES[1], None)
    if not given:
        yield _unset(machine)
        return
    read, *ignored = given
    for name in ignored:
        if given[name] != given[read]:
            yield problem(
                _TOPIC,
                f"{read} and {name} differ, and PyTorch reads {read} alone: "
                f"{given[name]!r} has no effect.",
                f"unset {read}",
            )
    yield from _check_variable(machine, read, given[read])


def _unset(machine: Machine) -> Finding:
    meaning = "PYTORCH_ALLOC_CONF is not set: PyTorch's defaults."
    if _no_expandable(machine):
        return ok(_TOPIC, meaning)
    return ok(
        _TOPIC,
        f"{meaning} Where sample lengths vary, segments that grow lose less to "
        "fragmentation.",
        f"export {_NEW}=expandable_segments:True",
    )


def _check_variable(machine: Machine, name: str, text: str) -> Iterator[Finding]:
    settings = read_settings(text)
    for error in settings.errors:
        yield problem(
            _TOPIC,
            f"PyTorch refuses {name}={text} when it first uses the card ({error}).",
            f"unset {name}",
        )
    if settings.errors:
        return
    notes = tuple(_notes(machine, settings.values))
    yield from notes or (ok(_TOPIC, f"{name}={text}."),)
    if name != _NEW:
        yield note(
            _TOPIC,
            f"{name} is the old name of {_NEW}; it still works, and is read first.",
            f"export {_NEW}='{text}'; unset {name}",
        )


def _notes(machine: Machine, values: Mapping[str, str]) -> Iterator[Finding]:
    """Yield notes on valid settings with surprising effects."""
    expandable = values.get("expandable_segments") == "True"
    fraction = values.get("per_process_memory_fraction")
    if expandable and _no_expandable(machine):
        yield note(
            _TOPIC,
            "expandable_segments does nothing on Windows and in WSL, with a warning.",
            f"export {_NEW}=max_split_size_mb:128",
        )
    if expandable and "max_split_size_mb" in values:
        yield note(
            _TOPIC,
            "max_split_size_mb is of little use where expandable_segments is on: "
            "segments that grow have no large pieces left over.",
            f"export {_NEW}=expandable_segments:True",
        )
    if values.get("backend") == "cudaMallocAsync":
        yield note(
            _TOPIC,
            "backend:cudaMallocAsync is not the allocator that budgetfit predicts: "
            "what is reserved will differ from a plan.",
            f"export {_NEW}=backend:native",
        )
    if "garbage_collection_threshold" in values and fraction is None:
        yield note(
            _TOPIC,
            "garbage_collection_threshold does nothing without a memory fraction: "
            "torch 2.13 reads it only then.",
            f"export {_NEW}=garbage_collection_threshold:0.8,"
            "per_process_memory_fraction:0.95",
        )
    if fraction is not None:
        yield note(
            _TOPIC,
            f"per_process_memory_fraction:{fraction} limits every process to that "
            "share of the card: hand a plan the limit.",
            "budgetfit plan MODEL --vram SIZE",
        )


def _no_expandable(machine: Machine) -> bool:
    return machine.system == "Windows" or machine.wsl
