"""Facts about an installation and findings about them, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """PyTorch, as imported in a subprocess.

    Attributes:
        version: Of the package; empty if it is not installed.
        error: Why it cannot be imported; empty if it can.
        import_timeout: Message if the import timed out; nothing more is known then.
        cuda: CUDA version of the build, as ``"13.0"``; empty for a CPU build.
        hip: ROCm version of the build.
        architectures: Compiled kernels: ``sm_80``, ``compute_90``.
        says_bf16: ``torch.cuda.is_bf16_supported()``; None without a GPU.
        tf32: Whether fp32 matrix products run in TF32.
    """

    version: str = ""
    error: str = ""
    import_timeout: str = ""
    cuda: str = ""
    hip: str = ""
    architectures: tuple[str, ...] = ()
    available: bool = False
    says_bf16: bool | None = None
    tf32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """NVIDIA's driver, from nvidia-smi.

    Attributes:
        version: For example ``"580.95.05"``; empty without a driver.
        cuda: The newest supported CUDA version; None if unknown.
    """

    version: str = ""
    cuda: tuple[int, int] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU.

    Attributes:
        name: As the driver reports it.
        capability: Compute capability; None if unknown.
        reserved_bytes: Neither used nor free: the driver's and the firmware's.
        sold_as_gb: Nominal memory; None for a GPU that is not in the table.
        ecc, mig: Whether these modes are on.
        uuid: To find its processes.
    """

    name: str
    capability: tuple[int, int] | None
    total_bytes: int
    used_bytes: int = 0
    reserved_bytes: int = 0
    sold_as_gb: int | None = None
    ecc: bool = False
    mig: bool = False
    uuid: str = ""

    @property
    def free_bytes(self) -> int:
        """What a process can have of its memory."""
        return self.total_bytes - self.used_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process with memory on a GPU; ``used_bytes`` is None if unknown."""

    pid: int
    name: str
    used_bytes: int | None
    gpu_uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFacts:
    """An installed library.

    Attributes:
        needs: Its requirements on the other libraries: ``torch==2.13.0``.
        wants: Those of its extras.
        error: Why its import failed, if that was tried.
        import_timeout: Message if the import timed out.
    """

    version: str
    needs: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    error: str = ""
    import_timeout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An installation and its machine.

    Attributes:
        system: ``Linux``, ``Windows`` or ``Darwin``.
        wsl: Whether it is Windows Subsystem for Linux.
        nvidia_gpu_on_bus: Whether the PCI bus has an NVIDIA GPU, with or without
            driver.
        mps: Whether CUDA's Multi-Process Service runs.
        cache_folder: Folder of the trace cache; empty if off.
        cache_error: Why that folder cannot be written; empty if it can.
        cache_no_key: Why no cache key can be computed; empty if one can.
        assumed: Whether ``gpus`` is one that the user named and that is not here.
    """

    system: str = "Linux"
    wsl: bool = False
    torch: TorchFacts = field(default_factory=TorchFacts)
    driver: DriverFacts = field(default_factory=DriverFacts)
    gpus: tuple[GpuFacts, ...] = ()
    processes: tuple[ProcessFacts, ...] = ()
    libraries: Mapping[str, LibraryFacts] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    nvidia_gpu_on_bus: bool = False
    mps: bool = False
    cache_folder: str = ""
    cache_error: str = ""
    cache_no_key: str = ""
    assumed: bool = False


Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: What was checked, in one or two words.
        verdict: ``problem`` where something fails or gives wrong numbers, else ``note``
            or ``ok``.
    """

    topic: str
    verdict: Verdict
    meaning: str
    commands: tuple[str, ...] = ()


def ok(topic: str, meaning: str, *commands: str) -> Finding:
    """Return a Finding that all is well; ``commands`` may still be useful."""
    return Finding(topic, "ok", meaning, commands)


def note(topic: str, meaning: str, *commands: str) -> Finding:
    """Return a Finding that is good to know."""
    return Finding(topic, "note", meaning, commands)


def problem(topic: str, meaning: str, *commands: str) -> Finding:
    """Return a Finding about something that fails or gives wrong numbers."""
    return Finding(topic, "problem", meaning, commands)
