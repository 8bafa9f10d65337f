"""GPU table: memory, compute rates and bandwidth of each GPU; lookup by name.

Rows are in ``gpus.toml``, each with its source. Unknown fields are absent there and
None here; assumed rates are marked (``rates_assumed``).
"""

import dataclasses
import difflib
import functools
import heapq
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from budgetfit.errors import InputError
from budgetfit.gpus.unsupported import unsupported_reason
from budgetfit.utils.format_bytes import format_bytes

# Vendor words that users leave out; they never distinguish two GPUs.
_VENDOR_WORDS: Final = re.compile(r"nvidia|geforce|tesla|rtx|gpu|generation")
# One widespread GPU per memory size, ascending;
# docs/decisions/0006-the-assumed-card.md.
_REFERENCES: Final = ("rtx-4090", "rtx-5090", "l40s", "h100-80gb", "h200", "b200")
CUDA_13_LOWEST_CAPABILITY: Final = (7, 5)  # CUDA 13 dropped older capabilities
# PyTorch publishes builds for CUDA 12 up to this release (pytorch/pytorch, issue
# 190385); the one for 12.6 is the last with Maxwell, Pascal and Volta.
_LAST_WITH_CUDA_12: Final = "2.14"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model.

    Rates are dense (no structured sparsity) and, on tensor cores, accumulate in
    fp32, as PyTorch's matrix products do.

    Attributes:
        name: Canonical name, for example ``"rtx-4090"``.
        title: The vendor's name.
        total_bytes: ``torch.cuda.get_device_properties(0).total_memory``.
        compute_capability: For example ``(8, 9)``.
        sm_count: Streaming multiprocessors.
        threads_per_sm: Maximum resident threads per SM.
        fp32_tflops: 10^12 operations per second outside tensor cores.
        tf32_tflops: None below capability 8.0, which has no tf32.
        fp16_tflops: None where fp16 is not faster or its rate is unknown.
        bf16_tflops: None below capability 8.0, which only emulates bf16.
        memory_gb_per_s: 10^9 bytes per second of device memory.
        link_gb_per_s: 10^9 bytes per second to the host, one direction.
        memory_class_gb: Nominal memory ("24 GB").
        source: Where the row comes from.
        total_source: Where ``total_bytes`` comes from.
        rates_assumed: Whether rates are scaled from another GPU; see ``source``.
        host_ram_gib: Pinned host memory assumed on an unknown machine with this GPU.
        interconnect: What connects several of them, as ``check_link`` spells it; empty
            for what is usual.
    """

    name: str
    title: str
    total_bytes: int
    compute_capability: tuple[int, int]
    sm_count: int
    threads_per_sm: int
    fp32_tflops: float
    tf32_tflops: float | None
    fp16_tflops: float | None
    bf16_tflops: float | None
    memory_gb_per_s: float
    link_gb_per_s: float | None
    memory_class_gb: int
    source: str
    total_source: str = ""
    rates_assumed: bool = False
    host_ram_gib: float = 16.0
    interconnect: str = ""


@functools.cache
def all_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs, in the table's order."""
    return tuple(gpu for gpu, _ in _rows())


def gpus_of_class(memory_class_gb: int) -> tuple[Gpu, ...]:
    """Return the GPUs with this nominal memory; may be empty."""
    return tuple(gpu for gpu in all_gpus() if gpu.memory_class_gb == memory_class_gb)


def find_gpu(text: str) -> Gpu:
    """Look up a GPU by name.

    Case, spaces, hyphens and the words NVIDIA, GeForce, Tesla and GPU do not matter;
    the memory class may be added ("RTX 4090 24GB") and must be where it decides
    ("A100" alone is two GPUs).

    Raises:
        InputError: No GPU of that name, or several; names the nearest, or says why
            another vendor's device is not supported.

    >>> find_gpu("NVIDIA GeForce RTX 4090").name
    'rtx-4090'
    """
    names = _names_by_key().get(_key(text), ())
    if len(names) == 1:
        return _gpus_by_name()[names[0]]
    if names:
        raise InputError(
            f"{text!r:.80} is the name of {len(names)} cards: {', '.join(names)}. "
            f'Write one of them, for example "{names[0]}".'
        )
    reason = unsupported_reason(_letters_and_digits(text))
    if reason is not None:
        raise InputError(
            f"{text!r:.80} {reason}. `budgetfit gpus` lists the cards to name."
        )
    raise InputError(
        f"{text!r:.80} is not in the card table. Nearest: {', '.join(_nearest(text))}. "
        "`budgetfit gpus` lists all cards; vram= takes a size instead."
    )


def gpu_from_properties(
    name: str,
    total_bytes: int,
    capability: tuple[int, int],
    sm_count: int,
    threads_per_sm: int,
) -> Gpu:
    """Return the ``Gpu`` of a present device: own properties, rates of the table.

    Rates are scaled by multiprocessors where only a slice of the GPU is visible (MIG),
    and from the nearest GPU by capability and multiprocessors where the table has no
    such row. ``rates_assumed`` is set then.

    Args:
        name: As ``torch.cuda.get_device_name`` gives it.
        total_bytes: ``total_memory``.
        capability: ``torch.cuda.get_device_capability``.
        sm_count: ``multi_processor_count``.
        threads_per_sm: ``max_threads_per_multi_processor``.
    """
    names = _names_by_key().get(_key(name), ())
    named = [
        gpu
        for gpu in map(_gpus_by_name().__getitem__, names)
        if gpu.compute_capability == tuple(capability)
    ]
    same_gpu = [gpu for gpu in named if gpu.sm_count == sm_count]
    if same_gpu:
        row = min(same_gpu, key=lambda gpu: abs(gpu.total_bytes - total_bytes))
        return _with_memory(row, total_bytes, "this device")
    like = _most_like(named or all_gpus(), capability, sm_count)
    model = _with_memory(like, total_bytes, "this device")
    return dataclasses.replace(
        _scaled(model, sm_count),
        name=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        title=name,
        compute_capability=(capability[0], capability[1]),
        threads_per_sm=threads_per_sm,
    )


def generic_gpu(total_bytes: int) -> Gpu:
    """Return the GPU assumed when only a memory size is known."""
    # The smallest reference GPU with at least this much memory, with exactly as much;
    # see docs/decisions/0006-the-assumed-card.md.
    references = [find_gpu(name) for name in _REFERENCES]
    model = next(
        (gpu for gpu in references if total_bytes <= gpu.memory_class_gb * 2**30),
        references[-1],
    )
    return dataclasses.replace(
        _with_memory(model, total_bytes, "given"),
        name="assumed",
        title=f"a {format_bytes(total_bytes)} card, assumed to be like {model.title}",
        source=f"assumed: {model.name} ({model.source})",
        rates_assumed=True,
    )


def builds_note(gpu: Gpu) -> str | None:
    """Return a note on the builds needed for an old GPU; None if any will do."""
    if gpu.compute_capability >= CUDA_13_LOWEST_CAPABILITY:
        return None
    major, minor = gpu.compute_capability
    return (
        f"{gpu.title} (capability {major}.{minor}) trains with PyTorch's builds for "
        f"CUDA 12.6 alone, the last of them torch {_LAST_WITH_CUDA_12}: pip install "
        f'"torch=={_LAST_WITH_CUDA_12}.*" --index-url '
        "https://download.pytorch.org/whl/cu126"
    )


@functools.cache
def _rows() -> tuple[tuple[Gpu, tuple[str, ...]], ...]:
    """Return each GPU with its aliases."""
    text = resources.files(__package__).joinpath("gpus.toml").read_text("utf-8")
    return tuple(_parsed(row) for row in tomllib.loads(text)["gpu"])


def _parsed(row: dict[str, Any]) -> tuple[Gpu, tuple[str, ...]]:
    also = tuple(row.pop("also", ()))
    row["compute_capability"] = tuple(row["compute_capability"])
    for rate in ("tf32_tflops", "fp16_tflops", "bf16_tflops", "link_gb_per_s"):
        row.setdefault(rate, None)
    return Gpu(**row), also


@functools.cache
def _gpus_by_name() -> dict[str, Gpu]:
    return {gpu.name: gpu for gpu in all_gpus()}


@functools.cache
def _names_by_key() -> dict[str, tuple[str, ...]]:
    """Map normalized names to the canonical names that they may mean."""
    names: dict[str, tuple[str, ...]] = {}
    for gpu, also in _rows():
        keys = {_key(text) for text in (gpu.name, gpu.title, *also)}
        with_class = {f"{key}{gpu.memory_class_gb}" for key in keys}
        for key in keys | with_class | {f"{key}gb" for key in with_class}:
            names[key] = (*names.get(key, ()), gpu.name)
    # A canonical name always means its own row.
    return names | {_key(gpu.name): (gpu.name,) for gpu in all_gpus()}


def _key(text: str) -> str:
    return _VENDOR_WORDS.sub("", _letters_and_digits(text))


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _nearest(text: str) -> list[str]:
    """Return the three most similar names, compared with and without RTX."""

    def likeness(gpu: Gpu) -> float:
        return max(
            difflib.SequenceMatcher(None, write(text), write(gpu.name)).ratio()
            for write in (_key, _letters_and_digits)
        )

    return [gpu.name for gpu in heapq.nlargest(3, all_gpus(), key=likeness)]


def _with_memory(gpu: Gpu, total_bytes: int, total_source: str) -> Gpu:
    # Within 10 % it is the same GPU on another machine; beyond, a memory variant, or
    # only a part of it is visible.
    same_class = abs(total_bytes - gpu.total_bytes) <= gpu.total_bytes // 10
    return dataclasses.replace(
        gpu,
        total_bytes=total_bytes,
        total_source=total_source,
        memory_class_gb=(
            gpu.memory_class_gb if same_class else round(total_bytes / 2**30)
        ),
    )


def _most_like(gpus: Sequence[Gpu], capability: tuple[int, int], sm_count: int) -> Gpu:
    def distance(gpu: Gpu) -> tuple[int, int, int]:
        major, minor = gpu.compute_capability
        return (
            abs(major - capability[0]),
            abs(minor - capability[1]),
            abs(gpu.sm_count - sm_count),
        )

    return min(gpus, key=distance)


def _scaled(model: Gpu, sm_count: int) -> Gpu:
    """Scale the rates of ``model`` to another number of multiprocessors."""
    share = sm_count / model.sm_count

    def times(rate: float | None) -> float | None:
        return None if rate is None else rate * share

    return dataclasses.replace(
        model,
        sm_count=sm_count,
        fp32_tflops=model.fp32_tflops * share,
        tf32_tflops=times(model.tf32_tflops),
        fp16_tflops=times(model.fp16_tflops),
        bf16_tflops=times(model.bf16_tflops),
        memory_gb_per_s=model.memory_gb_per_s * share,
        source=f"rates assumed: {model.name} by multiprocessors ({model.source})",
        rates_assumed=True,
    )
