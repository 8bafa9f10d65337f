"""Check that libraries can be imported and their versions are compatible."""

from collections.abc import Iterator
from typing import Final

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from budgetfit.doctor.check_torch import MEASURED_TRANSFORMERS, import_timeout
from budgetfit.doctor.facts import Finding, LibraryFacts, Machine, note, ok, problem

_MATCHING: Final = ("torchvision", "torchaudio")  # binaries for one release of torch
_OLDEST_TRANSFORMERS: Final = "5"
# transformers 5.23 works with no older ones (its integrations/peft.py and
# utils/import_utils.py); they are not among its pip requirements.
OLDEST: Final = {"peft": "0.20.0", "bitsandbytes": "0.46.1", "torchao": "0.15.0"}


def check_libraries(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each library: import and version requirements."""
    for name, library in machine.libraries.items():
        if name == "torch":
            continue
        if library.error:
            yield _broken(machine, name, library)
            continue
        if library.import_timeout:
            yield import_timeout(name, library.version, library.import_timeout)
        clash = [*_clashes(machine, name, library), *_too_old(machine, name, library)]
        yield from clash
        if name == "transformers":
            yield from _transformers(library)
        elif not clash and not library.import_timeout:
            yield ok(name, f"{library.version}.")
    override = machine.environment.get("BNB_CUDA_VERSION")
    if override:
        yield note(
            "bitsandbytes",
            f"BNB_CUDA_VERSION={override} makes it load its library for that "
            "CUDA, whatever torch is built for.",
            "unset BNB_CUDA_VERSION",
        )


def _broken(machine: Machine, name: str, library: LibraryFacts) -> Finding:
    torch = machine.torch
    if name in _MATCHING:
        return problem(
            name,
            f"{name} {library.version} does not load with torch "
            f"{torch.version} ({library.error}), and then transformers, timm, peft "
            "and lightning cannot be imported either: install both from one index.",
            f"pip uninstall -y {name}",
            f"pip install {name} --index-url "
            f"https://download.pytorch.org/whl/{_index(torch.cuda)}",
        )
    if name == "bitsandbytes":
        return problem(
            name,
            f"Its library for CUDA does not load ({library.error}): 8-bit "
            "optimizers and 4-bit weights will fail.",
            "pip install --upgrade bitsandbytes",
            "python -m bitsandbytes",
        )
    return problem(
        name,
        f"{name} {library.version} cannot be imported ({library.error}).",
        f"pip install --force-reinstall {name}",
    )


def _index(cuda: str) -> str:
    """Return the wheel index of a build: ``cpu``, ``cu130``."""
    return f"cu{cuda.replace('.', '')}" if cuda else "cpu"


def _clashes(machine: Machine, name: str, library: LibraryFacts) -> Iterator[Finding]:
    """Yield unmet version requirements between installed libraries."""
    for text in library.needs:
        other = Requirement(text)
        there = machine.libraries.get(other.name)
        if there is not None and not _allows(other, there.version):
            yield problem(
                name,
                f"{name} {library.version} needs {text}, and {other.name} is "
                f"{there.version}.",
                f"pip install --upgrade {name} {other.name}",
            )
    for text in library.wants:
        other = Requirement(text)
        there = machine.libraries.get(other.name)
        # Upper bounds of extras only concern the library's own tests.
        floors = [part for part in other.specifier if part.operator in {">", ">="}]
        if there is None or not floors:
            continue
        least = Requirement(f"{other.name}{','.join(map(str, floors))}")
        if not _allows(least, there.version):
            yield problem(
                other.name,
                f"{other.name} {there.version} is too old for {name} "
                f"{library.version}, which works with {least}.",
                f"pip install --upgrade {other.name}",
            )


def _too_old(machine: Machine, name: str, library: LibraryFacts) -> Iterator[Finding]:
    """Yield libraries that are too old for transformers."""
    least = OLDEST.get(name)
    if least is None or "transformers" not in machine.libraries:
        return
    if not _allows(Requirement(f"{name}>={least}"), library.version):
        yield problem(
            name,
            f"{name} {library.version} is too old for transformers 5, which "
            f"works with {name}>={least}.",
            f"pip install --upgrade {name}",
        )


def _allows(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True  # a custom build: unknown


def _transformers(library: LibraryFacts) -> Iterator[Finding]:
    version = library.version
    if not _allows(Requirement(f"transformers>={_OLDEST_TRANSFORMERS}"), version):
        yield problem(
            "transformers",
            f"transformers {version} is older than what budgetfit needs, "
            f"{_OLDEST_TRANSFORMERS}.",
            "pip install --upgrade transformers",
        )
    else:
        yield ok(
            "transformers",
            f"{version}; predictions were measured with {MEASURED_TRANSFORMERS}.",
        )
