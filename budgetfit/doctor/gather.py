"""Gather the facts of this machine, slow imports in parallel."""

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from packaging.requirements import InvalidRequirement, Requirement

from budgetfit.doctor.facts import (
    DriverFacts,
    GpuFacts,
    LibraryFacts,
    Machine,
    TorchFacts,
)
from budgetfit.doctor.gather_gpu import gather_gpus, has_nvidia_gpu_on_bus, known_gpu
from budgetfit.doctor.subprocesses import IMPORT_LIMIT_S, import_in_subprocess, run_tool
from budgetfit.gpus.table import find_gpu
from budgetfit.traces.cache.folder import cache_folder

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
# Binaries for one torch release. The others are pure Python, and slow to import.
_TRIED: Final = ("torch", "torchvision", "torchaudio", "bitsandbytes")
_MARK: Final = "budgetfit-cache:"  # of traces.cache.check
_VARIABLES: Final = ("PYTORCH", "CUDA", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "BNB_")


def gather() -> Machine:
    """Gather this machine's facts; takes as long as the slowest import."""
    versions = {name: _version(name) for name in LIBRARIES}
    present = {name: version for name, version in versions.items() if version}
    # First, as the imports below create CUDA contexts that would be listed.
    driver, found, processes = gather_gpus()
    tried = [name for name in _TRIED if name in present]
    with ThreadPoolExecutor() as pool:
        no_key = pool.submit(_no_key) if "transformers" in present else None
        answers = dict(zip(tried, pool.map(import_in_subprocess, tried), strict=True))
    folder, error = _cache()
    return Machine(
        system=platform.system(),
        wsl="microsoft" in platform.release().lower(),
        torch=_torch(present.get("torch", ""), answers.get("torch", {})),
        driver=driver,
        gpus=found,
        processes=processes,
        libraries={
            name: _library(name, version, answers.get(name, {}))
            for name, version in present.items()
        },
        environment=_environment(os.environ),
        nvidia_gpu_on_bus=has_nvidia_gpu_on_bus(),
        mps=any("mps-server" in process.name for process in processes),
        cache_folder=folder,
        cache_error=error,
        cache_no_key=no_key.result() if no_key is not None else "",
    )


def with_gpu(machine: Machine, name: str) -> Machine:
    """Return the machine with only this GPU, assumed where it is not present.

    Raises:
        InputError: No GPU of that name, or several; names the nearest.
    """
    gpu = find_gpu(name)
    for present in machine.gpus:
        if known_gpu(present.name) is gpu:
            return dataclasses.replace(machine, gpus=(present,))
    assumed = GpuFacts(
        name=gpu.title,
        capability=gpu.compute_capability,
        total_bytes=gpu.total_bytes,
        sold_as_gb=gpu.memory_class_gb,
    )
    return dataclasses.replace(
        machine, gpus=(assumed,), processes=(), driver=DriverFacts(), assumed=True
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except Exception:  # noqa: BLE001 - half-removed packages raise all sorts
        return ""


def _torch(version: str, answer: Mapping[str, Any]) -> TorchFacts:
    known = {field.name for field in dataclasses.fields(TorchFacts)}
    values = {name: value for name, value in answer.items() if name in known}
    values["architectures"] = tuple(values.get("architectures", ()))
    return TorchFacts(**{"version": version, **values})


def _library(name: str, version: str, answer: Mapping[str, Any]) -> LibraryFacts:
    needs, wants = _requirements(name)
    return LibraryFacts(
        version=version,
        needs=needs,
        wants=wants,
        error=answer.get("error", ""),
        import_timeout=answer.get("import_timeout", ""),
    )


def _requirements(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a package's requirements on the others, and those of its extras."""
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
    """Return the relevant variables; ``ALLOC`` also matches misspelt names."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_VARIABLES) or "ALLOC" in name.upper()
    }


def _cache() -> tuple[str, str]:
    """Return the folder of the trace cache, and why it cannot be written."""
    folder = cache_folder()
    if folder is None:
        return "", ""
    try:
        return str(folder), _unwritable(folder)
    except OSError as error:  # name too long, or no permission
        return str(folder), f"{error.filename or folder}: {error.strerror}"


def _no_key() -> str:
    """Return why no cache key can be computed; empty if one can, or on failure."""
    words = (sys.executable, "-W", "ignore", "-m", "budgetfit.traces.cache.check")
    lines = run_tool(*words, limit_s=IMPORT_LIMIT_S).text.splitlines()
    found = (line for line in reversed(lines) if line.startswith(_MARK))
    return next(found, _MARK).removeprefix(_MARK)


def _unwritable(folder: "Path") -> str:
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} may not be written"
    return ""
