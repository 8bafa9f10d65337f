"""Set the null driver up from nothing: an environment, the libraries, a check.

    python -m tests.accuracy.nulldriver.install [--torch 2.15.0] [--also accelerate]

The environment is ``.nulldriver/torch-<version>`` in the root of the repository, which
git ignores. What is there already is left alone. Downloads about 3 GB and needs gcc,
binutils and about 6 GB of disk.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.accuracy.nulldriver.build import build, is_built
from tests.accuracy.nulldriver.cards import ROOT, find_card
from tests.accuracy.nulldriver.run import environment_folder, pinned_version, variables
from tests.accuracy.nulldriver.wheel import wheel_of

CONSTRAINTS: Final = ROOT / "constraints.txt"
_ASK_VERSIONS: Final = """
import importlib.metadata, sys
for package in sys.argv[1:]:
    try:
        print(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        print("none")
"""


def wanted_versions(torch: str, also: Sequence[str] = ()) -> dict[str, str]:
    """What the measuring processes import, at the versions of the project's tests."""
    packages = ("numpy", "platformdirs", "pydantic", "transformers", *also)
    return {"torch": torch, **{name: pinned_version(name) for name in packages}}


def pip_arguments(wanted: Mapping[str, str], constraints: Path) -> list[str]:
    """What to ask pip for.

    ``===`` compares the text of a version: ``==2.13.0`` would also take a
    ``2.13.0+cpu`` that another index offers, and pip would even prefer it.
    """
    exact = [
        f"{package}{'===' if package == 'torch' else '=='}{version}"
        for package, version in wanted.items()
    ]
    quiet = ["--quiet", "--disable-pip-version-check"]
    return ["install", *quiet, "--constraint", str(constraints), *exact]


def constraints_without_torch(text: str) -> str:
    """The pinned versions of everything else, for an environment with another torch."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("torch=="))


def install(environment: Path, wanted: Mapping[str, str], python: str) -> None:
    """Make the environment, or bring it to the wanted versions."""
    interpreter = environment / "bin" / "python"
    if not interpreter.exists():
        _run(python, "-m", "venv", environment)
    installed = _run(interpreter, "-c", _ASK_VERSIONS, *wanted).split()
    if installed == list(wanted.values()):
        return
    print(f"installing torch {wanted['torch']} into {environment}: some minutes")
    constraints = environment / "constraints.txt"
    text = constraints_without_torch(CONSTRAINTS.read_text("utf-8"))
    constraints.write_text(text, encoding="utf-8")
    _run(interpreter, "-m", "pip", *pip_arguments(wanted, constraints))


def prepare(environment: Path) -> None:
    """Build and check the libraries, unless they are there as their sources are."""
    wheel = wheel_of(environment)
    libraries = environment / "nulldriver"
    if not is_built(wheel, libraries):
        build(wheel, libraries)
    after = variables(find_card("t4"), environment, libraries, os.environ, memory_gib=1)
    smoke = ("-m", "tests.accuracy.nulldriver.smoke")
    print(_run(environment / "bin" / "python", *smoke, variables=after).strip())


def _run(*command: str | Path, variables: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=variables, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        msg = f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}"
        raise RuntimeError(msg)
    return done.stdout


def main() -> int:
    """Set up what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", default=pinned_version("torch"), help="its version")
    parser.add_argument("--environment", type=Path, help="another folder for it")
    parser.add_argument(
        "--also", nargs="*", default=[], metavar="PACKAGE", help="of constraints.txt"
    )
    parser.add_argument("--python", default=sys.executable, help="to make it with")
    options = parser.parse_args()
    missing = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    if missing:
        parser.error(f"not found: {', '.join(missing)} (Debian: apt-get install gcc)")
    environment = (options.environment or environment_folder(options.torch)).resolve()
    install(environment, wanted_versions(options.torch, options.also), options.python)
    prepare(environment)
    print(f"ready: {environment}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
