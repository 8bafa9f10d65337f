"""What is known of an installation: plain values, so that judging them needs none."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """PyTorch, as a process of its own saw it.

    Attributes:
        version: Of the package; empty if it is not installed.
        error: Why it cannot be imported; empty if it can.
        unanswered: How long it was waited for, in vain; nothing more is known then.
        cuda: The CUDA that it was built for, as ``"13.0"``; empty for a CPU build.
        hip: The ROCm that it was built for.
        architectures: What it has kernels for: ``sm_80``, ``compute_90``.
        available: ``torch.cuda.is_available()``.
        says_bf16: ``torch.cuda.is_bf16_supported()``; None without a card.
        tf32: Whether fp32 matrix products run in TF32.
    """

    version: str = ""
    error: str = ""
    unanswered: str = ""
    cuda: str = ""
    hip: str = ""
    architectures: tuple[str, ...] = ()
    available: bool = False
    says_bf16: bool | None = None
    tf32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """NVIDIA's driver, as nvidia-smi tells.

    Attributes:
        version: For example ``"580.95.05"``; empty without a driver.
        cuda: The newest CUDA that it runs; None if unknown.
        error: What nvidia-smi said when it failed.
    """

    version: str = ""
    cuda: tuple[int, int] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """One card.

    Attributes:
        name: As the driver calls it.
        capability: Compute capability; None if the driver does not tell.
        total_bytes, used_bytes: Of its memory.
        sold_as_gb: The number that it is sold by; None for one that is not in the
            table.
        ecc, mig: Whether these modes are on.
        uuid: To find its processes.
    """

    name: str
    capability: tuple[int, int] | None
    total_bytes: int
    used_bytes: int = 0
    sold_as_gb: int | None = None
    ecc: bool = False
    mig: bool = False
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process with memory on a card; ``used_bytes`` is None where nobody tells."""

    pid: int
    name: str
    used_bytes: int | None
    card: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFacts:
    """A library that training uses.

    Attributes:
        version: Of the package.
        needs: What it asks of the other libraries, as pip's texts: ``torch==2.13.0``.
        wants: The same for what is optional (its extras).
        error: Why it does not load, as far as that was tried.
        unanswered: How long it was waited for, in vain; whether it loads is not known.
    """

    version: str
    needs: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    error: str = ""
    unanswered: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An installation and the machine that it is on.

    Attributes:
        system: ``Linux``, ``Windows`` or ``Darwin``.
        wsl: Whether it is Linux inside Windows.
        python: Its version.
        torch, driver, cards, processes: See there.
        libraries: By name, those that are installed.
        environment: The variables that matter here.
        cards_on_bus: Whether the bus has an NVIDIA card, driver or not.
        mps: Whether CUDA's Multi-Process Service runs.
        cache_folder: Where traces are kept; empty if nowhere.
        cache_error: Why that folder cannot be written; empty if it can.
        cache_no_key: What keeps traces from being found again; empty if nothing.
        assumed: Whether ``cards`` is one that the user named and that is not here.
    """

    system: str = "Linux"
    wsl: bool = False
    python: str = ""
    torch: TorchFacts = field(default_factory=TorchFacts)
    driver: DriverFacts = field(default_factory=DriverFacts)
    cards: tuple[CardFacts, ...] = ()
    processes: tuple[ProcessFacts, ...] = ()
    libraries: Mapping[str, LibraryFacts] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    cards_on_bus: bool = False
    mps: bool = False
    cache_folder: str = ""
    cache_error: str = ""
    cache_no_key: str = ""
    assumed: bool = False
