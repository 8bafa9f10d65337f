"""Made facts: a machine where all is well, to be spoilt in one place."""

from dataclasses import replace
from typing import Any

from budgetfit.doctor.checks import run_checks
from budgetfit.doctor.facts import (
    DriverFacts,
    Finding,
    GpuFacts,
    LibraryFacts,
    Machine,
    TorchFacts,
)

MIB, GIB = 2**20, 2**30
RTX_4090 = GpuFacts(
    name="NVIDIA GeForce RTX 4090",
    capability=(8, 9),
    total_bytes=24564 * MIB,
    used_bytes=10 * MIB,
    sold_as_gb=24,
    uuid="GPU-1",
)
T4 = GpuFacts(
    name="Tesla T4", capability=(7, 5), total_bytes=15360 * MIB, sold_as_gb=16, ecc=True
)
V100 = GpuFacts(name="Tesla V100", capability=(7, 0), total_bytes=16 * GIB)
# What torch 2.13.0+cu130 was built for.
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
TORCH = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    architectures=ARCHITECTURES,
    available=True,
    says_bf16=True,
)
CPU_TORCH = TorchFacts(version="2.13.0+cpu")
GOOD = Machine(
    torch=TORCH,
    driver=DriverFacts(version="580.95.05", cuda=(13, 0)),
    gpus=(RTX_4090,),
    nvidia_gpu_on_bus=True,
    libraries={
        "torch": LibraryFacts(version="2.13.0+cu130"),
        "transformers": LibraryFacts(version="5.23.0", wants=("accelerate>=1.1.0",)),
        "accelerate": LibraryFacts(version="1.15.0", needs=("torch>=2.0.0",)),
    },
    cache_folder="/home/me/.cache/budgetfit/traces",
)
NO_CARD = replace(
    GOOD, torch=CPU_TORCH, driver=DriverFacts(), gpus=(), nvidia_gpu_on_bus=False
)


def findings(machine: Machine, **changes: Any) -> list[Finding]:
    return list(run_checks(replace(machine, **changes)))


def bad(machine: Machine, **changes: Any) -> list[Finding]:
    """What is no ``ok``."""
    return [f for f in findings(machine, **changes) if f.verdict != "ok"]


def only(machine: Machine, **changes: Any) -> Finding:
    """The one finding that is no ``ok``."""
    [finding] = bad(machine, **changes)
    return finding
