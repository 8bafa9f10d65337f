"""All facts of this machine, the slow ones at the same time."""

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import InvalidRequirement, Requirement

from budgetfit.doctor.facts import (
    CardFacts,
    DriverFacts,
    LibraryFacts,
    Machine,
    TorchFacts,
)
from budgetfit.doctor.gather_gpu import cards_on_bus, gather_cards
from budgetfit.doctor.subprocesses import IMPORT_LIMIT_S, probe_library, run_tool
from budgetfit.errors import InputError
from budgetfit.gpus.table import Gpu, find_gpu
from budgetfit.traces.cache.cache import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

LIBRARIES: Final = (
    "torch",
    "torchvision",
    "torchaudio",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "bitsandbytes",
    "torchao",
    "lightning",
    "deepspeed",
    "timm",
    "keras",
)
# These have compiled code for one torch. The others are Python, and slow to import.
_TRIED: Final = ("torch", "torchvision", "torchaudio", "bitsandbytes")
_MARK: Final = "budgetfit-cache:"  # of planning.cache_check
_VARIABLES: Final = ("PYTORCH", "CUDA", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "BNB_")


def gather() -> Machine:
    """Return this machine's facts; takes as long as the slowest library's import."""
    versions = {name: _version(name) for name in LIBRARIES}
    present = {name: version for name, version in versions.items() if version}
    # First, or the libraries' own contexts would be among the processes.
    driver, found, processes = gather_cards()
    tried = [name for name in _TRIED if name in present]
    with ThreadPoolExecutor() as pool:
        no_key = pool.submit(_no_key) if "transformers" in present else None
        answers = dict(zip(tried, pool.map(probe_library, tried), strict=True))
    folder, error = _cache()
    return Machine(
        system=platform.system(),
        wsl="microsoft" in platform.release().lower(),
        python=platform.python_version(),
        torch=_torch(present.get("torch", ""), answers.get("torch", {})),
        driver=driver,
        cards=found,
        processes=processes,
        libraries={
            name: _library(name, version, answers.get(name, {}))
            for name, version in present.items()
        },
        environment=_environment(os.environ),
        cards_on_bus=cards_on_bus(),
        mps=any("mps-server" in process.name for process in processes),
        cache_folder=folder,
        cache_error=error,
        cache_no_key=no_key.result() if no_key is not None else "",
    )


def with_card(machine: Machine, name: str) -> Machine:
    """Return the machine as if it had a card of the table, unless it has it.

    Raises:
        InputError: No card of that name, or several; names the nearest.
    """
    gpu = find_gpu(name)
    for card in machine.cards:
        if _is_of(card, gpu):
            return dataclasses.replace(machine, cards=(card,))
    card = CardFacts(
        name=gpu.title,
        capability=gpu.compute_capability,
        total_bytes=gpu.total_bytes,
        sold_as_gb=gpu.memory_class_gb,
    )
    return dataclasses.replace(
        machine, cards=(card,), processes=(), driver=DriverFacts(), assumed=True
    )


def _is_of(card: CardFacts, gpu: Gpu) -> bool:
    try:
        return find_gpu(card.name).name == gpu.name
    except InputError:  # not in the table, or several are called so
        return False


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except Exception:  # noqa: BLE001 - half-removed packages raise all sorts
        return ""


def _torch(version: str, answer: Mapping[str, Any]) -> TorchFacts:
    known = {field.name for field in dataclasses.fields(TorchFacts)}
    told = {name: value for name, value in answer.items() if name in known}
    told["architectures"] = tuple(told.get("architectures", ()))
    return TorchFacts(**{"version": version, **told})


def _library(name: str, version: str, answer: Mapping[str, Any]) -> LibraryFacts:
    needs, wants = _requirements(name)
    return LibraryFacts(
        version=version,
        needs=needs,
        wants=wants,
        error=answer.get("error", ""),
        unanswered=answer.get("unanswered", ""),
    )


def _requirements(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a package asks of the others, and what its extras ask."""
    needs, wants = [], []
    try:
        texts = importlib.metadata.requires(name) or []
    except Exception:  # noqa: BLE001 - see _version
        texts = []
    for text in texts:
        try:
            asked = Requirement(text)
        except InvalidRequirement:
            continue
        if asked.name not in LIBRARIES or not asked.specifier:
            continue
        line = f"{asked.name}{asked.specifier}"
        if asked.marker is None or asked.marker.evaluate({"extra": ""}):
            needs.append(line)
        elif "extra" in str(asked.marker):
            wants.append(line)
    return tuple(dict.fromkeys(needs)), tuple(dict.fromkeys(wants))


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what matters here; ``ALLOC`` also finds a name that is mistyped."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_VARIABLES) or "ALLOC" in name.upper()
    }


def _cache() -> tuple[str, str]:
    """Return the folder of traces, and why it cannot be written."""
    folder = cache_folder()
    if folder is None:
        return "", ""
    try:
        return str(folder), _unwritable(folder)
    except OSError as error:  # a name too long, a folder that may not be looked into
        return str(folder), f"{error.filename or folder}: {error.strerror}"


def _no_key() -> str:
    """Return why traces cannot be found again; empty if they can, or if it failed."""
    words = (sys.executable, "-W", "ignore", "-m", "budgetfit.traces.cache.check")
    lines = run_tool(*words, limit_s=IMPORT_LIMIT_S).text.splitlines()
    told = (line for line in reversed(lines) if line.startswith(_MARK))
    return next(told, _MARK).removeprefix(_MARK)


def _unwritable(folder: "Path") -> str:
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} may not be written"
    return ""
