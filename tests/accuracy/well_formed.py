"""What every recording must hold, checked before it is written and by the tests."""

from typing import Any, Final

from tests.accuracy.case import Case
from tests.accuracy.cases import CASES

NULL_DEVICE_NAME: Final = "NullCUDA"  # what the null driver calls its device
NULL_DRIVER: Final = "null driver"
GPU: Final = "gpu"
FORMAT: Final = 1

_SIZES: Final = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "end_allocated_bytes",
    "end_reserved_bytes",
)


def origin_of(device_name: str) -> str:
    """What a device of that name is."""
    return NULL_DRIVER if device_name == NULL_DEVICE_NAME else GPU


def phases_of(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """Every phase of every step, in order, without the setup."""
    return [phase for step in recording["steps"] for phase in step]


def faults(recording: dict[str, Any]) -> list[str]:
    """What is wrong with a recording, in words; empty when nothing is."""
    found = []
    if recording["format"] != FORMAT:
        found.append(f"format {recording['format']} is not {FORMAT}")
    card = recording["card"]
    if recording["origin"] != origin_of(card["name"]):
        found.append(f"a device {card['name']} is not of origin {recording['origin']}")
    if (card["imitates"] is None) != (recording["origin"] == GPU):
        found.append("a card is imitated on the null driver, and only there")
    if recording["origin"] == NULL_DRIVER and recording["software"]["cudnn_enabled"]:
        found.append("cuDNN does not run on the null driver")
    case = CASES.get(recording["name"])
    if case is None:
        return [*found, f"no case is called {recording['name']}"]
    if recording["case"] != case.as_dict():
        found.append("the case has changed since the recording was made")
    if recording["software"]["allocator"] != case.allocator:
        found.append("the allocator's settings are not those of the case")
    return [*found, *_faults_of_order(recording, case), *_faults_of_sizes(recording)]


def _faults_of_order(recording: dict[str, Any], case: Case) -> list[str]:
    """Phases that are missing, double or in another order."""
    found = []
    micro_steps = case.gradient_accumulation_steps
    step = [
        (phase, micro_step)
        for micro_step in range(micro_steps)
        for phase in ("forward", "backward")
    ]
    step.append(("optimizer", micro_steps - 1))
    setup = ["setup", "compile"] if case.compile else ["setup"]
    if [phase["phase"] for phase in recording["setup"]] != setup:
        found.append(f"the phases before the first step are not {' and '.join(setup)}")
    if len(recording["steps"]) != len(case.batch_sizes):
        found.append(f"not {len(case.batch_sizes)} steps")
    found += [
        f"step {number} does not have the phases of a step"
        for number, phases in enumerate(recording["steps"])
        if [(phase["phase"], phase["micro_step"]) for phase in phases] != step
    ]
    return found


def _faults_of_sizes(recording: dict[str, Any]) -> list[str]:
    """Sizes that cannot be."""
    found = []
    if recording["setup"][0]["end_allocated_bytes"] < recording["parameter_bytes"]:
        found.append("less is allocated after the setup than the parameters take")
    for phase in (*recording["setup"], *phases_of(recording)):
        allocated, reserved, end_allocated, end_reserved = (
            phase[size] for size in _SIZES
        )
        if not 0 < end_allocated <= allocated <= reserved:
            found.append(f"{phase['phase']}: allocated bytes are out of order")
        if not end_allocated <= end_reserved <= reserved:
            found.append(f"{phase['phase']}: reserved bytes are out of order")
        if reserved > recording["card"]["total_bytes"]:
            found.append(f"{phase['phase']}: more is reserved than the card has")
        if recording["origin"] == NULL_DRIVER and phase["process_bytes"] is not None:
            found.append("the null driver has no process bytes")
    return found
