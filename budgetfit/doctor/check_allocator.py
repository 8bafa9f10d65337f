"""Check the settings of PyTorch's caching allocator (``PYTORCH_ALLOC_CONF``)."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Final

from budgetfit.core.allocator.parse_settings import parse_values
from budgetfit.core.allocator.settings import VARIABLE, VARIABLES, AllocatorSettings
from budgetfit.doctor.facts import Finding, Machine, note, ok, problem
from budgetfit.errors import InputError

_TOPIC: Final = "allocator"
_LIKE_A_NAME: Final = 0.8
# Valid names that are similar to those of the allocator.
_OTHERS: Final = (
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_XPU_ALLOC_CONF",
    "PYTORCH_MPS_ALLOC_CONF",
)


def check_allocator(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the allocator's environment variables."""
    for wrong, right in mistyped_names(machine.environment):
        yield problem(
            _TOPIC,
            f"{wrong} is no variable that PyTorch reads: did you mean {right}?",
            f"export {right}=${wrong}; unset {wrong}",
        )
    given = {
        name: machine.environment[name]
        for name in VARIABLES
        if name in machine.environment
    }
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
        f"export {VARIABLE}=expandable_segments:True",
    )


def _check_variable(machine: Machine, name: str, text: str) -> Iterator[Finding]:
    why = why_refused(text)
    if why is not None:
        yield problem(
            _TOPIC,
            f"PyTorch refuses {name}={text} when it first uses the card ({why}).",
            f"unset {name}",
        )
        return
    notes = tuple(_notes(machine, parse_values(text)))
    yield from notes or (ok(_TOPIC, f"{name}={text}."),)
    if name != VARIABLE:
        yield note(
            _TOPIC,
            f"{name} is the old name of {VARIABLE}; it still works, and is read first.",
            f"export {VARIABLE}='{text}'; unset {name}",
        )


def why_refused(text: str) -> str | None:
    """Return why PyTorch refuses a value of the variable; None if it takes it."""
    try:
        # Whether another allocator can be predicted is no question of PyTorch's.
        values = {**parse_values(text), "backend": "native"}
        AllocatorSettings.of(values)
    except (ValueError, InputError) as error:
        return str(error)
    return None


def mistyped_names(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield misspelt variable names, each with the correct one."""
    for name in environment:
        if name in VARIABLES or name.upper() in _OTHERS:
            continue
        near = difflib.get_close_matches(
            name.upper(), VARIABLES, n=1, cutoff=_LIKE_A_NAME
        )
        if near:
            yield name, near[0]


def _notes(machine: Machine, values: Mapping[str, object]) -> Iterator[Finding]:
    """Yield notes on valid settings with surprising effects."""
    expandable = values.get("expandable_segments", False)
    fraction = values.get("per_process_memory_fraction")
    if expandable and _no_expandable(machine):
        yield note(
            _TOPIC,
            "expandable_segments does nothing on Windows and in WSL, with a warning.",
            f"export {VARIABLE}=max_split_size_mb:128",
        )
    if expandable and "max_split_size_mb" in values:
        yield note(
            _TOPIC,
            "max_split_size_mb is of little use where expandable_segments is on: "
            "segments that grow have no large pieces left over.",
            f"export {VARIABLE}=expandable_segments:True",
        )
    if values.get("backend") == "cudaMallocAsync":
        yield note(
            _TOPIC,
            "backend:cudaMallocAsync is not the allocator that budgetfit predicts: "
            "what is reserved will differ from a plan.",
            f"export {VARIABLE}=backend:native",
        )
    if "garbage_collection_threshold" in values and fraction is None:
        yield note(
            _TOPIC,
            "garbage_collection_threshold does nothing without a memory fraction: "
            "torch 2.13 reads it only then.",
            f"export {VARIABLE}=garbage_collection_threshold:0.8,"
            "per_process_memory_fraction:0.95",
        )
    if fraction is not None:
        yield note(
            _TOPIC,
            f"per_process_memory_fraction:{fraction} limits every process to that "
            "share of the card. Plans for this card keep within it; say it of others.",
            f"budgetfit plan MODEL --allocator per_process_memory_fraction:{fraction}",
        )


def _no_expandable(machine: Machine) -> bool:
    return machine.system == "Windows" or machine.wsl
