"""Check that PyTorch, its CUDA version, the driver and the GPU are compatible."""

from collections.abc import Iterator
from typing import Final

from budgetfit.doctor.facts import Finding, GpuFacts, Machine, note, ok, problem
from budgetfit.gpus.table import CUDA_13_LOWEST_CAPABILITY

# CUDA major versions and the first Linux driver of each; minor versions run on all
# drivers of their major (CUDA Compatibility, "Minor Version Compatibility").
_FIRST_DRIVER: Final = {11: 450, 12: 525, 13: 580}
# What nvidia-smi says where it fails, why, and what to do; the last is of all others.
_SMI_FAILURES: Final = (
    (
        "mismatch",
        "The driver was updated: the machine must be started anew.",
        "sudo reboot",
    ),
    (
        "no devices",
        (
            "The driver is loaded and sees no card: the kernel's log says why, or this "
            "is a container that was given none."
        ),
        "sudo dmesg | grep NVRM",
    ),
    (
        "is lost",
        "The card no longer answers: the machine must be started anew.",
        "sudo reboot",
    ),
    (
        "permission",
        "This user, or this container, may not open the card's devices.",
        "ls -l /dev/nvidia*",
    ),
    (
        "unknown error",
        (
            "In a container that worked before: its cards were taken away, as happens "
            "when the host reloads systemd. Start the container anew."
        ),
        "docker restart CONTAINER",
    ),
    (
        "no answer within",
        "The driver hangs: the kernel's log says why.",
        "sudo dmesg | grep NVRM",
    ),
    (
        "",
        "The driver is not loaded, or is no longer the kernel's.",
        "sudo modprobe nvidia",
    ),
)
_WHEELS: Final = {12: "cu126", 13: "cu130"}
_OLDEST_TORCH: Final = (2, 11)
# Versions of the recorded measurements: tests/accuracy/recordings.
MEASURED_TORCH: Final = ("2.11", "2.13", "2.15")
MEASURED_TRANSFORMERS: Final = "5.23"


def check_torch(machine: Machine) -> Iterator[Finding]:
    """Yield findings about torch, its CUDA version, the driver and kernels."""
    torch = machine.torch
    if not torch.version or torch.error:
        yield _not_importable(machine)
        return
    if torch.import_timeout:
        yield import_timeout("torch", torch.version, torch.import_timeout)
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
        for gpu in machine.gpus:
            yield _kernels(machine, gpu)


def install_command(major: int) -> str:
    """Return the pip command that installs torch for a CUDA major version."""
    return (
        'pip install --force-reinstall "torch>=2.11" --index-url '
        f"https://download.pytorch.org/whl/{_WHEELS.get(major, 'cu126')}"
    )


def import_timeout(name: str, version: str, waited: str) -> Finding:
    """Return the finding for a library whose import timed out."""
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
    here = machine.nvidia_gpu_on_bus or (machine.gpus and not machine.assumed)
    if here:
        name = machine.gpus[0].name if machine.gpus else "an NVIDIA card"
        oldest, runs = min(_WHEELS), machine.driver.cuda
        first = ""
        if runs is not None and runs[0] < oldest:
            first = (
                f" Driver {machine.driver.version} is too old for every build: install "
                f"driver {_FIRST_DRIVER[oldest]} or newer first."
            )
        return problem(
            "CUDA",
            f"torch {torch.version} is built without CUDA and will not use "
            f"this machine's {name}.{first}",
            install_command(_cuda_for(machine)),
        )
    meaning = (
        "torch is built without CUDA: enough to plan; training needs another build, "
        "where the card is."
    )
    if machine.assumed:
        return note("CUDA", meaning, install_command(_cuda_for(machine)))
    return ok("CUDA", meaning)


def _cuda_for(machine: Machine) -> int:
    """Return the CUDA major version that driver and GPUs support."""
    newest = max(_WHEELS)
    known = [gpu.capability for gpu in machine.gpus if gpu.capability]
    if any(capability < CUDA_13_LOWEST_CAPABILITY for capability in known):
        return min(_WHEELS)
    driver = machine.driver.cuda
    return newest if driver is None else min(driver[0], newest)


def _driver(machine: Machine) -> Iterator[Finding]:
    torch, driver = machine.torch, machine.driver
    if driver.error:
        said = driver.error.lower()
        why, command = next(rest for sign, *rest in _SMI_FAILURES if sign in said)
        failed = f"nvidia-smi fails: {driver.error.rstrip('.')}."
        yield problem("driver", f"{failed} {why}", command)
        return
    if not driver.version:
        if machine.nvidia_gpu_on_bus and not machine.assumed:
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
        *((install_command(driver.cuda[0]),) if driver.cuda[0] in _WHEELS else ()),
    )


def _kernels(machine: Machine, gpu: GpuFacts) -> Finding:
    built, capability = machine.torch.architectures, gpu.capability
    if not built or capability is None:
        return note(
            "kernels",
            f"What torch has kernels for could not be compared with {gpu.name}.",
        )
    major, minor = capability
    if any(runs_on(name, capability) for name in built):
        return ok(
            "kernels", f"torch has kernels for {gpu.name} (capability {major}.{minor})."
        )
    # GPUs older than all kernels need an older build, newer ones a newer build.
    older = all(_capability(name) > capability for name in built)
    wheel = min(_WHEELS) if older else max(_WHEELS)
    return problem(
        "kernels",
        f"torch has no kernels for {gpu.name} (capability {major}.{minor}), "
        f"only for {' '.join(built)}: every operation will fail there.",
        install_command(wheel),
    )


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether kernels for ``architecture`` run on a compute capability.

    ``sm_80`` runs on 8.0 and later minor versions of 8; with an ``a`` on that one only,
    with an ``f`` on its family; ``compute_80`` (PTX) is JIT-compiled for later ones
    (CUDA C++ Programming Guide, "Application Compatibility").
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
