"""Driver, GPUs and their processes, from nvidia-smi."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from budgetfit.doctor.facts import DriverFacts, GpuFacts, ProcessFacts
from budgetfit.doctor.subprocesses import run_tool
from budgetfit.errors import InputError
from budgetfit.gpus.table import Gpu, find_gpu

_MIB: Final = 2**20
_FIELDS: Final = (
    "name,driver_version,memory.total,memory.used,memory.free,uuid,"
    "ecc.mode.current,mig.mode.current,compute_cap"
)
_OLD_FIELDS: Final = "name,driver_version,memory.total,memory.used,memory.free,uuid"
_CSV: Final = "--format=csv,noheader,nounits"
_WSL_PATH: Final = "/usr/lib/wsl/lib"
_NVIDIA: Final = "0x10de"


class NvidiaSmiFacts(NamedTuple):
    """Parsed output of nvidia-smi."""

    driver: DriverFacts
    gpus: tuple[GpuFacts, ...] = ()
    processes: tuple[ProcessFacts, ...] = ()


def gather_gpus() -> NvidiaSmiFacts:
    """Run nvidia-smi; without it there is no driver."""
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_WSL_PATH)
    if tool is None:
        return NvidiaSmiFacts(DriverFacts())
    output = run_tool(tool, f"--query-gpu={_FIELDS}", _CSV)
    if output.code not in {0, None}:  # old drivers lack some fields
        output = run_tool(tool, f"--query-gpu={_OLD_FIELDS}", _CSV)
    if output.code != 0:
        first, *_ = _lines(output.text) or ["nvidia-smi gave no answer"]
        return NvidiaSmiFacts(DriverFacts(error=first[:200]))
    rows = [[word.strip() for word in line.split(",")] for line in _lines(output.text)]
    gpus = tuple(
        parse_gpu(row) for row in rows if len(row) >= _OLD_FIELDS.count(",") + 1
    )
    header = re.search(r"CUDA Version: *(\d+)\.(\d+)", run_tool(tool).text)
    driver = DriverFacts(
        version=rows[0][1] if rows and len(rows[0]) > 1 else "",
        cuda=(int(header[1]), int(header[2])) if header else None,
    )
    listed = run_tool(
        tool, "--query-compute-apps=pid,process_name,used_memory,gpu_uuid", _CSV
    )
    return NvidiaSmiFacts(driver, gpus, tuple(parse_processes(listed.text)))


def parse_gpu(row: list[str]) -> GpuFacts:
    """Parse a CSV row of ``--query-gpu``."""
    ecc, mig, capability = [*row[6:9], "", "", ""][:3]
    total, used, free = (_mib(word) or 0 for word in row[2:5])
    parts = re.fullmatch(r"(\d+)\.(\d+)", capability)
    known = known_gpu(row[0])
    reported = (int(parts[1]), int(parts[2])) if parts else None
    return GpuFacts(
        name=row[0],
        capability=reported or (known.compute_capability if known else None),
        total_bytes=total,
        used_bytes=used,
        reserved_bytes=max(total - used - free, 0) if row[4].isdecimal() else 0,
        sold_as_gb=known.memory_class_gb if known else None,
        ecc=ecc == "Enabled",
        mig=mig == "Enabled",
        uuid=row[5],
    )


def parse_processes(text: str) -> Iterator[ProcessFacts]:
    """Parse the rows of ``--query-compute-apps``; process names may have commas."""
    for line in _lines(text):
        pid, _, rest = line.partition(",")
        match [word.strip() for word in rest.rsplit(",", 2)]:
            case name, used, uuid if pid.strip().isdecimal():
                yield ProcessFacts(
                    pid=int(pid), name=name, used_bytes=_mib(used), gpu_uuid=uuid
                )


def has_nvidia_gpu_on_bus() -> bool:
    """Whether the PCI bus has an NVIDIA GPU (Linux), with or without a driver."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith("0x03"):  # display controllers
            return True
    return False


def known_gpu(name: str) -> Gpu | None:
    """Look up the name that a driver reports; None if it is unknown or ambiguous."""
    try:
        return find_gpu(name)
    except InputError:
        return None


def _mib(word: str) -> int | None:
    return int(word) * _MIB if word.isdecimal() else None


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
