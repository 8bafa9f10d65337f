"""Parse CUDA and host out-of-memory messages of PyTorch 1.0 to 2.15.

The messages are written in ``c10/cuda/CUDACachingAllocator.cpp`` (before 1.0 in THC),
``CUDAMallocAsyncAllocator.cpp`` and, for the host, ``c10/core/impl/alloc_cpu.cpp``.
They are found inside tracebacks and logs, wrapped by terminals and boxed by rich.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["allocator", "driver", "library", "host"]

_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Bounded, or a line of a million digits would take minutes, and int() refuses 4,301.
_SIZE: Final = r"\b(\d{1,20}(?:\.\d{1,9})?) (bytes|KiB|MiB|GiB)"
_EXABYTE: Final = 2**60  # the allocator prints no larger size
# First words of each kind. Spaces may be line breaks.
_BEGINNINGS: Final[tuple[tuple[Kind, str], ...]] = (
    ("allocator", r"(?:CUDA|HIP) out of memory\. (?:Tried|Allocation)"),
    ("allocator", r"Allocation on device \d+ would exceed allowed memory"),
    ("driver", r"(?:CUDA|HIP)(?: driver)? error: out of memory"),
    ("driver", r"cuda runtime error \(2\) ?: out of memory"),
    ("driver", r"CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory"),
    ("library", r"(?:CUBLAS|CUDNN|CUSOLVER|CUFFT|MIOPEN|HIPBLAS)_STATUS_ALLOC_FAILED"),
    ("library", r"Failed to CUDA (?:malloc|calloc) "),
    ("host", r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"),
    ("allocator", r"(?:CUDA|HIP) out of memory"),
)
_START: Final = re.compile(
    "|".join(f"({start})" for _, start in _BEGINNINGS).replace(" ", r"\s+")
)
# Wordings of each number, those of the newest releases first.
_WORDINGS: Final = {
    "requested_bytes": (
        "Tried to allocate SIZE",
        "Requested size: SIZE",
        "Requested : SIZE",
    ),
    "total_bytes": (
        "total capaci?ty of SIZE",  # version 2.1 wrote "capacty"
        "SIZE total capacity",
        "Device limit : SIZE",
    ),
    "free_bytes": (
        "of which SIZE is free",
        r"SIZE free\b",
        r"Free \(according to CUDA\): SIZE",
    ),
    "allowed_bytes": ("SIZE allowed", r"memory fraction\) : SIZE"),
    "allocated_bytes": (
        "Of the allocated memory SIZE is allocated by PyTorch",
        "SIZE already allocated",
        "Currently allocated : SIZE",
    ),
    # Up to version 1.3 "cached" was that.
    "idle_bytes": ("SIZE is reserved by PyTorch but unallocated", "SIZE cached"),
    "process_bytes": ("this process has SIZE memory in use",),
}
_LONGEST: Final = 6000  # characters of one message, with its processes
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BOXES: Final = re.compile("[\u2500-\u257f\u276f]+")
# "[rank0]: " of torchrun, "[1,0]<stderr>:" of mpirun, "0: " of srun.
_PREFIX: Final = re.compile(
    r"^[ \t]*(?:\[rank\d+\]:|\[\d+,\d+\]<\w+>:|\d+:)[ \t]?", re.MULTILINE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a GPU, a CUDA library or the host is out of memory."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return "OutOfMemoryError" in names or (
        isinstance(error, RuntimeError) and _START.search(str(error)) is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryMessage:
    """The numbers of one out-of-memory message; None where it has none.

    Attributes:
        kind: ``allocator`` (PyTorch's, with numbers), ``driver`` or ``library``
            (outside the allocator, without numbers), ``host``.
        start: Offset in the text that ``strip_formatting`` returns.
        device: Index of the GPU.
        requested_bytes: The failed allocation; 2^60 for "more than 1EB".
        total_bytes, free_bytes: Of the GPU.
        allowed_bytes: The process's limit, where a memory fraction is set.
        allocated_bytes, idle_bytes: Allocated by PyTorch, and reserved but unallocated.
        pools_bytes: Of the allocated bytes, those in private pools (CUDA graphs).
        process_bytes: Of this process, as the driver reports it.
        others: Other processes: pid and bytes.
        on_amd: Whether the GPU is an AMD one.
    """

    kind: Kind
    start: int
    device: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    idle_bytes: int | None = None
    pools_bytes: int = 0
    process_bytes: int | None = None
    others: tuple[tuple[int, int], ...] = ()
    on_amd: bool = False

    @property
    def reserved_bytes(self) -> int | None:
        """What PyTorch's allocator had reserved: allocated and idle."""
        if self.allocated_bytes is None or self.idle_bytes is None:
            return None
        return self.allocated_bytes + self.idle_bytes

    @property
    def usable_bytes(self) -> int | None:
        """What this process's allocator could have reserved."""
        if self.free_bytes is None or self.reserved_bytes is None:
            return None
        size = self.free_bytes + self.reserved_bytes
        return size if self.allowed_bytes is None else min(size, self.allowed_bytes)

    def other_bytes(self, context_bytes: int) -> int | None:
        """Return about how much memory other processes use.

        ``context_bytes``: of this process, for when the driver does not report it.
        """
        if self.total_bytes is None or self.free_bytes is None:
            return None
        mine = self.process_bytes
        if mine is None:
            mine = (self.reserved_bytes or 0) + context_bytes
        return max(0, self.total_bytes - self.free_bytes - mine)


def strip_formatting(text: str) -> str:
    """Strip ANSI colours, boxes and rank prefixes; keep line breaks."""
    text = _ESCAPES.sub("", text).replace("\r\n", "\n")
    if "\\n  File " in text:  # a line of a JSON log; elsewhere it may be a Windows path
        text = text.replace("\\n", "\n")
    return _PREFIX.sub("", _BOXES.sub(" ", text))


def parse_out_of_memory(text: str) -> tuple[OutOfMemoryMessage, ...]:
    """Parse all out-of-memory messages of a plain text, in order."""
    found = [
        (match.start(), _BEGINNINGS[(match.lastindex or 1) - 1][0])
        for match in _START.finditer(text)
    ]
    ends = [start for start, _ in found[1:]] + [len(text)] * bool(found)
    return tuple(
        _read(kind, start, " ".join(text[start : min(end, start + _LONGEST)].split()))
        for (start, kind), end in zip(found, ends, strict=True)
    )


def _read(kind: Kind, start: int, text: str) -> OutOfMemoryMessage:
    if kind == "host":
        host = re.search(r"allocate (\d{1,20}) bytes", text)
        requested = int(host[1]) if host else None
        return OutOfMemoryMessage(kind=kind, start=start, requested_bytes=requested)
    if kind != "allocator":
        return OutOfMemoryMessage(kind=kind, start=start)
    sizes = {name: _size(text, *wordings) for name, wordings in _WORDINGS.items()}
    if "more than 1EB" in text:
        sizes["requested_bytes"] = _EXABYTE
    if (sizes["allowed_bytes"] or 0) >= _EXABYTE:
        # cudaMallocAsync prints the largest number there is for "no limit".
        sizes["allowed_bytes"] = None
    reserved = _size(text, "SIZE reserved in total by PyTorch")  # from version 1.4 on
    allocated = sizes["allocated_bytes"]
    if sizes["idle_bytes"] is None and reserved is not None and allocated is not None:
        sizes["idle_bytes"] = max(0, reserved - allocated)
    device = re.search(r"\bGPU (\d{1,9})\b|on device (\d{1,9})\b", text)
    others = re.findall(rf"Process (\d{{1,20}}) has {_SIZE} memory in use", text)
    return OutOfMemoryMessage(
        kind=kind,
        start=start,
        device=int(device[1] or device[2]) if device else None,
        pools_bytes=_size(text, "with SIZE allocated in private pools") or 0,
        others=tuple((int(pid), _bytes(n, unit)) for pid, n, unit in others),
        on_amd=text.startswith("HIP"),
        **sizes,
    )


def _size(text: str, *wordings: str) -> int | None:
    """Return the size in the first wording that matches."""
    for wording in wordings:
        found = re.search(wording.replace("SIZE", _SIZE), text)
        if found is not None:
            return _bytes(found[1], found[2])
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def own_process(
    message: OutOfMemoryMessage,
) -> tuple[int | None, Sequence[tuple[int, int]]]:
    """Tell this process from the other processes of a message, also in a container."""
    # There pids of the driver and of the process differ, so the message lists it like
    # any other: it is the smallest that can hold what PyTorch had reserved.
    reserved = message.reserved_bytes
    if message.process_bytes is not None or reserved is None:
        return message.process_bytes, message.others
    # Sizes are printed with two decimals of a GiB.
    able = [row for row in message.others if row[1] >= reserved - 2**25]
    if not able:
        return None, message.others
    own = min(able, key=lambda row: row[1])
    return own[1], [row for row in message.others if row is not own]
