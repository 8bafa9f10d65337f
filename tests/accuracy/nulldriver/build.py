"""Build the null driver for the torch wheel of one virtual environment.

    python -m tests.accuracy.nulldriver.build ENVIRONMENT [--out FOLDER]

Compiles ``src/`` and adds a stub for every other symbol that the wheel imports. Needs
gcc and binutils, no CUDA toolkit. FOLDER is ``ENVIRONMENT/nulldriver`` by default.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.accuracy.nulldriver import wheel as wheels
from tests.accuracy.nulldriver.wheel import Wheel

SOURCES: Final = Path(__file__).parent / "src"
FINGERPRINT: Final = "built-from"  # beside the libraries: of which sources they are

_NOT_SUPPORTED: Final = 801  # cudaErrorNotSupported
# What would go on with garbage if it "succeeded": these say that they do not exist.
NOT_IMITATED: Final = (
    r"cudaStreamBeginCapture\w*|cudaGraph(Instantiate|AddNode|Launch)\w*|cudaIpc\w*"
)
_COMPILER: Final = (
    *("gcc", "-std=gnu11", "-O1", "-fPIC", "-fno-builtin"),
    *("-Wall", "-Wno-unused-function", "-Werror"),
)


@dataclass(frozen=True, kw_only=True)
class Library:
    """One shared library of the null driver.

    Attributes:
        file: Its name, by which it is found in place of NVIDIA's.
        sources: The files of ``src/`` that it consists of.
        stub_value: What a generated stub returns: success, or "not supported".
    """

    file: str
    sources: tuple[str, ...]
    stub_value: int = 0


PRELOADED: Final = Library(
    file="libnullcuda.so",
    sources=(
        *("device.c", "device_memory.c", "virtual_memory.c", "host_memory.c"),
        *("streams.c", "kernels.c", "cublas.c"),
    ),
)
DRIVER: Final = Library(file="libcuda.so.1", sources=("driver_api.c",))
MANAGEMENT: Final = Library(
    file="libnvidia-ml.so.1",
    sources=("nvml.c",),
    stub_value=3,  # NVML_ERROR_NOT_SUPPORTED
)


def wanted_of(wheel: Wheel) -> dict[Library, set[str]]:
    """The symbols that each library has to define for a wheel."""
    undefined = wheels.undefined_symbols(wheel)
    driver = (
        wheels.matching(undefined, wheels.DRIVER)
        | wheels.names_looked_up(wheel, wheels.DRIVER)
        | wheels.driver_functions_declared(wheel)
    )
    return {
        PRELOADED: wheels.matching(undefined, wheels.RUNTIME),
        # cuFile is GPUDirect Storage: another library, which torch brings along.
        DRIVER: {name for name in driver if not name.startswith("cuFile")},
        MANAGEMENT: wheels.names_looked_up(wheel, wheels.MANAGEMENT),
    }


def stubs_in_c(missing: Iterable[str], stub_value: int) -> str:
    """C source that defines every missing function: it returns one number.

    >>> print(stubs_in_c({"cudaMemset", "cudaIpcGetMemHandle"}, 0), end="")
    long cudaIpcGetMemHandle(void) { return 801; }
    long cudaMemset(void) { return 0; }
    """
    lines = []
    for name in sorted(missing):
        refused = re.fullmatch(NOT_IMITATED, name)
        value = _NOT_SUPPORTED if refused else stub_value
        lines.append(f"long {name}(void) {{ return {value}; }}\n")
    return "".join(lines)


def archs_in_c(compiled_archs: tuple[int, ...]) -> str:
    """The header that ``kernels.c`` includes."""
    numbers = ", ".join(map(str, compiled_archs))
    return f"static const int COMPILED_ARCHS[] = {{{numbers}}};\n"


def fingerprint(wheel: Wheel) -> str:
    """Changes with the sources, with this builder and with the wheel."""
    digest = hashlib.sha256(f"{wheel.torch} {wheel.packages}".encode())
    for path in sorted([*SOURCES.rglob("*.[ch]"), Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_built(wheel: Wheel, out: Path) -> bool:
    """Whether a folder holds the libraries as the sources are now."""
    path = out / FINGERPRINT
    return path.is_file() and path.read_text("utf-8").strip() == fingerprint(wheel)


def build(wheel: Wheel, out: Path) -> dict[str, int]:
    """Write the libraries to a folder; returns the number of stubs in each.

    Running programs keep the libraries that they have opened: new ones take their
    place only when all are built.
    """
    out.mkdir(parents=True, exist_ok=True)
    stub_counts = {}
    with tempfile.TemporaryDirectory(dir=out) as name:
        work = Path(name)
        (work / "compiled_archs.h").write_text(
            archs_in_c(wheel.compiled_archs), encoding="utf-8"
        )
        for library, wanted in wanted_of(wheel).items():
            stub_counts[library.file] = _link(library, wanted, wheel, work)
        for file in (work / "done").iterdir():
            shutil.move(file, out / file.name)
    (out / FINGERPRINT).write_text(fingerprint(wheel) + "\n", encoding="utf-8")
    return stub_counts


def _link(library: Library, wanted: set[str], wheel: Wheel, work: Path) -> int:
    """Compile a library's sources, fill up with stubs, link. Returns their number."""
    objects = [
        _compiled(SOURCES / source, wheel, work / f"{source}.o")
        for source in library.sources
    ]
    missing = wanted - _defined_in(objects)
    stubs = work / f"stubs_of_{library.file}.c"
    stubs.write_text(stubs_in_c(missing, library.stub_value), encoding="utf-8")
    objects.append(_compiled(stubs, wheel, work / f"{stubs.name}.o"))
    (work / "done").mkdir(exist_ok=True)
    shutil.copy(stubs, work / "done")  # for whoever looks for the cause of a crash
    linker = ("gcc", "-shared", "-pthread", f"-Wl,-soname,{library.file}")
    _run(*linker, "-o", work / "done" / library.file, *objects)
    return len(missing)


def _compiled(source: Path, wheel: Wheel, target: Path) -> Path:
    folders = (SOURCES, target.parent)
    includes = [f"-I{folder}" for folder in folders]
    # The wheel's headers are not ours to warn about.
    includes += ["-isystem", str(wheel.headers)]
    _run(*_COMPILER, *includes, "-c", source, "-o", target)
    return target


def _defined_in(objects: list[Path]) -> set[str]:
    done = _run("nm", "--defined-only", "--extern-only", *objects)
    return wheels.symbols_in(done)


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        msg = f"{command[0]} failed:\n{done.stderr}"
        raise RuntimeError(msg)
    return done.stdout


def main() -> int:
    """Build for the environment named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path)
    parser.add_argument("--out", type=Path, help="folder for the libraries")
    options = parser.parse_args()
    wheel = wheels.wheel_of(options.environment)
    out = options.out or options.environment / "nulldriver"
    archs = ", ".join(map(str, wheel.compiled_archs))
    print(f"null driver for torch {wheel.torch} (kernels for {archs}) in {out}")
    for file, count in build(wheel, out).items():
        print(f"  {file}: {count} stubs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
