"""Whether PyTorch, the driver and the card go together."""

from collections.abc import Iterator
from typing import Final

from budgetfit.doctor.facts import CardFacts, Machine
from budgetfit.doctor.finding import Finding, note, ok, problem
from budgetfit.gpus.torch_builds import OLDEST_OF_CUDA_13

# Majors of CUDA and the first Linux driver that runs them; the minors of one major run
# on all its drivers (CUDA Compatibility, "Minor Version Compatibility").
_FIRST_DRIVER: Final = {11: 450, 12: 525, 13: 580}
_WHEELS: Final = {12: "cu126", 13: "cu130"}
_OLDEST_TORCH: Final = (2, 11)
# With which predictions were compared, byte by byte: tests/accuracy/recordings.
MEASURED_TORCH: Final = ("2.11", "2.13", "2.15")
MEASURED_TRANSFORMERS: Final = "5.23"


def judge_torch(machine: Machine) -> Iterator[Finding]:
    """Yield what there is to say about torch, its CUDA, the driver and kernels."""
    torch = machine.torch
    if not torch.version or torch.error:
        yield _not_importable(machine)
        return
    if torch.unanswered:
        yield unanswered("torch", torch.version, torch.unanswered)
        return
    yield _version(torch.version)
    if torch.hip:
        yield note(
            "CUDA",
            f"torch {torch.version} is for AMD cards; budgetfit's numbers are "
            "for NVIDIA's.",
        )
        return
    yield _build(machine)
    yield from _driver(machine)
    if torch.cuda:
        for card in machine.cards:
            yield _kernels(machine, card)


def install(major: int) -> str:
    """Return how to install torch for a major version of CUDA."""
    return (
        'pip install --force-reinstall "torch>=2.11" --index-url '
        f"https://download.pytorch.org/whl/{_WHEELS.get(major, 'cu126')}"
    )


def unanswered(name: str, version: str, waited: str) -> Finding:
    """Return what can be said of a library that was not imported in time."""
    return note(
        name,
        f"{name} {version} was not checked ({waited}): this machine is busy, "
        "its disk slow, or the import hangs.",
        f"time python -c 'import {name}'",
        "budgetfit doctor",
    )


def _not_importable(machine: Machine) -> Finding:
    torch = machine.torch
    if not torch.version:
        meaning = "torch is not installed: nothing can be planned."
        return problem("torch", meaning, 'pip install "torch>=2.11"')
    return problem(
        "torch",
        f"torch {torch.version} is installed and cannot be imported ({torch.error}).",
        'pip install --force-reinstall "torch>=2.11"',
    )


def _version(version: str) -> Finding:
    release = ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])
    if _numbers(release) < _OLDEST_TORCH:
        return problem(
            "torch",
            f"torch {version} is older than what budgetfit needs, 2.11.",
            'pip install --upgrade "torch>=2.11"',
        )
    if release in MEASURED_TORCH:
        return ok("torch", f"{version}; predictions were measured with {release}.")
    measured = f"{', '.join(MEASURED_TORCH[:-1])} and {MEASURED_TORCH[-1]}"
    return note(
        "torch",
        f"{version}; predictions were measured with {measured}, and bytes "
        "differ a little between releases: verify a plan once.",
        "budgetfit verify plan.json",
    )


def _build(machine: Machine) -> Finding:
    torch = machine.torch
    if torch.cuda:
        return ok("CUDA", f"torch is built for CUDA {torch.cuda}.")
    here = machine.cards_on_bus or (machine.cards and not machine.assumed)
    if here:
        name = machine.cards[0].name if machine.cards else "an NVIDIA card"
        return problem(
            "CUDA",
            f"torch {torch.version} is built without CUDA and will not use "
            f"this machine's {name}.",
            install(_cuda_for(machine)),
        )
    meaning = (
        "torch is built without CUDA: enough to plan; training needs another build, "
        "where the card is."
    )
    if machine.assumed:
        return note("CUDA", meaning, install(_cuda_for(machine)))
    return ok("CUDA", meaning)


def _cuda_for(machine: Machine) -> int:
    """Return the major of CUDA that driver and cards can have."""
    newest = max(_WHEELS)
    known = [card.capability for card in machine.cards if card.capability]
    if any(capability < OLDEST_OF_CUDA_13 for capability in known):
        return min(_WHEELS)
    driver = machine.driver.cuda
    return newest if driver is None else min(driver[0], newest)


def _driver(machine: Machine) -> Iterator[Finding]:
    torch, driver = machine.torch, machine.driver
    if driver.error:
        why, command = (
            ("The driver was updated: the machine must be started anew.", "sudo reboot")
            if "mismatch" in driver.error
            else (
                "The driver is not loaded, or is no longer the kernel's.",
                "sudo modprobe nvidia",
            )
        )
        failed = f"nvidia-smi fails: {driver.error.rstrip('.')}."
        yield problem("driver", f"{failed} {why}", command)
        return
    if not driver.version:
        if machine.cards_on_bus and not machine.assumed:
            yield problem(
                "driver",
                "This machine has an NVIDIA card and no driver for it.",
                "ubuntu-drivers devices",
                "sudo ubuntu-drivers install",
            )
        return
    yield _driver_version(machine)
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}
    old = driver.cuda and torch.cuda and driver.cuda[0] < _numbers(torch.cuda)[0]
    if torch.cuda and not (torch.available or hidden or old):
        yield problem(
            "driver",
            "Driver and card are there, but torch.cuda.is_available() is False.",
            'python -c "import torch; torch.cuda.init()"',
        )


def _driver_version(machine: Machine) -> Finding:
    torch, driver = machine.torch, machine.driver
    if not torch.cuda or driver.cuda is None:
        return ok("driver", f"{driver.version}.")
    runs = ".".join(map(str, driver.cuda))
    needed = _numbers(torch.cuda)[0]
    if driver.cuda[0] >= needed:
        return ok(
            "driver", f"{driver.version} runs CUDA {runs}, torch asks for {torch.cuda}."
        )
    first = _FIRST_DRIVER.get(needed)
    newer = f"driver {first} or newer" if first else "a newer driver"
    return problem(
        "driver",
        f"Driver {driver.version} runs CUDA up to {runs}, and torch is built "
        f"for {torch.cuda}: install {newer}, or a torch for CUDA {driver.cuda[0]}.",
        *((install(driver.cuda[0]),) if driver.cuda[0] in _WHEELS else ()),
    )


def _kernels(machine: Machine, card: CardFacts) -> Finding:
    built, capability = machine.torch.architectures, card.capability
    if not built or capability is None:
        return note(
            "kernels",
            f"What torch has kernels for could not be compared with {card.name}.",
        )
    major, minor = capability
    if any(runs_on(name, capability) for name in built):
        return ok(
            "kernels",
            f"torch has kernels for {card.name} (capability {major}.{minor}).",
        )
    # What is older than every kernel needs an older build, what is newer a newer one.
    older = all(_capability(name) > capability for name in built)
    wheel = min(_WHEELS) if older else max(_WHEELS)
    return problem(
        "kernels",
        f"torch has no kernels for {card.name} (capability {major}.{minor}), "
        f"only for {' '.join(built)}: every operation will fail there.",
        install(wheel),
    )


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether kernels for ``architecture`` run on a card.

    ``sm_80`` runs on 8.0 and later minors of 8; with an ``a`` on that one alone, with
    an ``f`` on its family; ``compute_80`` is compiled anew on whatever is later (CUDA
    C++ Programming Guide, "Application Compatibility").
    """
    kind, _, number = architecture.partition("_")
    built = _capability(architecture)
    if number.endswith("a"):
        return built == capability
    if kind == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def _capability(architecture: str) -> tuple[int, int]:
    digits = "".join(sign for sign in architecture if sign.isdecimal()) or "00"
    return int(digits[:-1] or 0), int(digits[-1])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
