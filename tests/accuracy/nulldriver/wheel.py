"""What the CUDA build of torch in an environment expects of a CUDA driver.

Nothing is assumed about a version: the symbols to answer, the CUDA headers and the
compiled architectures are all read from the installed wheel.
"""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RUNTIME: Final = r"(__cuda|cuda|cublas)[A-Z]\w*"  # the CUDA runtime and cuBLAS
DRIVER: Final = r"cu[A-Z]\w*"
MANAGEMENT: Final = r"nvml[A-Z]\w*"

_ASK_TORCH: Final = """
import sysconfig, torch
print(sysconfig.get_path("purelib"))
print(torch.__version__)
print(torch.version.cuda or "")
print(torch._C._cuda_getArchFlags() or "" if torch.version.cuda else "")
"""


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """An installed CUDA build of torch.

    Attributes:
        packages: The environment's folder of packages.
        torch: Its version, for example ``"2.13.0+cu130"``.
        cuda: Version of CUDA that it was built with.
        compiled_archs: For example ``(75, 80, 90)``: kernels exist for these.
    """

    packages: Path
    torch: str
    cuda: str
    compiled_archs: tuple[int, ...]

    @property
    def headers(self) -> Path:
        """Folder of the CUDA runtime's headers, which the wheel brings along."""
        found = sorted((self.packages / "nvidia").glob("*/include/cuda_runtime_api.h"))
        if not found:
            msg = f"no cuda_runtime_api.h under {self.packages / 'nvidia'}"
            raise FileNotFoundError(msg)
        return found[0].parent


def wheel_of(environment: Path) -> Wheel:
    """The torch that is installed in a virtual environment.

    Raises:
        ValueError: When it is not a CUDA build.
    """
    python = environment / "bin" / "python"
    done = subprocess.run(
        [python, "-c", _ASK_TORCH], check=True, capture_output=True, text=True
    )
    packages, torch, cuda, archs = done.stdout.splitlines()
    if not cuda:
        msg = f"torch {torch} in {environment} is not a CUDA build"
        raise ValueError(msg)
    return Wheel(
        packages=Path(packages), torch=torch, cuda=cuda, compiled_archs=archs_in(archs)
    )


def archs_in(flags: str) -> tuple[int, ...]:
    """The architectures for which machine code exists.

    >>> archs_in("sm_90 sm_75 sm_100 compute_120")
    (75, 90, 100)
    """
    return tuple(sorted({int(number) for number in re.findall(r"\bsm_(\d+)", flags)}))


def undefined_symbols(wheel: Wheel) -> set[str]:
    """Every symbol that a library of torch leaves to others to define."""
    libraries = sorted((wheel.packages / "torch").rglob("*.so"))
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries],
        check=False,  # complains about files without dynamic symbols
        capture_output=True,
        text=True,
    )
    return symbols_in(done.stdout)


def symbols_in(nm_output: str) -> set[str]:
    """The symbols that ``nm`` printed, without their versions.

    >>> sorted(symbols_in("         U cudaMalloc@libcudart.so.13\\n\\n0010 T begin\\n"))
    ['begin', 'cudaMalloc']
    """
    lines = (line.split() for line in nm_output.splitlines())
    return {words[-1].partition("@")[0] for words in lines if len(words) > 1}


def matching(names: Iterable[str], pattern: str) -> set[str]:
    """Those names that a pattern describes as a whole."""
    return {name for name in names if re.fullmatch(pattern, name)}


def names_looked_up(wheel: Wheel, pattern: str) -> set[str]:
    """Function names among the strings of torch's allocator library.

    It opens the driver and the management library while it runs and looks their
    functions up by name.
    """
    library = (wheel.packages / "torch" / "lib" / "libc10_cuda.so").read_bytes()
    strings = re.findall(rb"[\x20-\x7e]{6,}", library)
    return matching((text.decode("ascii") for text in strings), pattern)


def driver_functions_declared(wheel: Wheel) -> set[str]:
    """Every driver function of ``cuda.h``: Triton may want any of them."""
    text = (wheel.headers / "cuda.h").read_text("utf-8", errors="replace")
    name = r"\bcu[A-Z][A-Za-z0-9]+(?:_v\d+|_ptsz|_ptds)*\b"
    return set(re.findall(name, text))
