"""The card table: what is known of each GPU, and how a user's words find it.

Rows live in ``gpus.toml``, each with its source. A field that is unknown is absent
there and None here; rates that had to be assumed say so (``rates_assumed``).
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
from budgetfit.gpus.unsupported import why_not
from budgetfit.utils.format_bytes import format_bytes

# Sellers add these words, users leave them out; they never tell two cards apart.
_VENDOR_WORDS: Final = re.compile(r"nvidia|geforce|tesla|rtx|gpu|generation")
# One widespread card for each step of memory, in ascending order; decision 0006.
_REFERENCES: Final = (
    "rtx-4090",
    "rtx-5090",
    "l40s",
    "h100-80gb",
    "h200",
    "b200",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card.

    Rates are dense (no structured sparsity) and, on tensor cores, accumulate in
    fp32, as PyTorch's matrix products do.

    Attributes:
        name: Canonical name, for example ``"rtx-4090"``.
        title: What the maker calls it.
        total_bytes: ``torch.cuda.get_device_properties(0).total_memory``.
        compute_capability: For example ``(8, 9)``.
        sm_count: Streaming multiprocessors.
        threads_per_sm: Most resident threads on one of them.
        fp32_tflops: 10^12 operations per second outside tensor cores.
        tf32_tflops: None below capability 8.0, which has no tf32.
        fp16_tflops: None where fp16 is not faster or its rate is unknown.
        bf16_tflops: None below capability 8.0, which only emulates bf16.
        memory_gb_per_s: 10^9 bytes per second of device memory.
        link_gb_per_s: 10^9 bytes per second to the host, one direction.
        memory_class_gb: The number that the card is sold by ("24 GB").
        source: Where the row comes from.
        total_source: Where ``total_bytes`` comes from.
        rates_assumed: Whether rates are another card's, scaled; see ``source``.
        host_ram_gib: GiB of host memory that may be pinned on a machine with this card
            of which nothing else is known.
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
    host_ram_gib: float = 16


@functools.cache
def all_gpus() -> tuple[Gpu, ...]:
    """Return every card of the table, in the table's order."""
    return tuple(gpu for gpu, _ in _rows())


def gpus_of_class(memory_class_gb: int) -> tuple[Gpu, ...]:
    """Return the cards sold with so many GB; none is a valid answer."""
    return tuple(gpu for gpu in all_gpus() if gpu.memory_class_gb == memory_class_gb)


def find_gpu(text: str) -> Gpu:
    """Return the card that a name means.

    Case, spaces, hyphens and the words NVIDIA, GeForce, Tesla and GPU do not matter;
    the memory class may be added ("RTX 4090 24GB") and must be where it decides
    ("A100" alone is two cards).

    Raises:
        InputError: No card of that name, or several; names the nearest, or says why
            another maker's device cannot be planned for.

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
    reason = why_not(_letters_and_digits(text))
    if reason is not None:
        raise InputError(
            f"{text!r:.80} {reason}. `budgetfit gpus` lists the cards to name."
        )
    raise InputError(
        f"{text!r:.80} is not in the card table. Nearest: {', '.join(_nearest(text))}. "
        "`budgetfit gpus` lists all cards; --vram (vram=) takes a size instead."
    )


def gpu_from_properties(
    name: str,
    total_bytes: int,
    capability: tuple[int, int],
    sm_count: int,
    threads_per_sm: int,
) -> Gpu:
    """Return a real device: its own properties, with the rates of its table row.

    Where only a slice of the card is visible, as under MIG, its rates are scaled by
    multiprocessors; where the table has no such card, those of the nearest one by
    capability and multiprocessors are. ``rates_assumed`` is set then.

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
    same_card = [gpu for gpu in named if gpu.sm_count == sm_count]
    if same_card:
        row = min(same_card, key=lambda gpu: abs(gpu.total_bytes - total_bytes))
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
    """Return the card assumed when only a size is known.

    The smallest reference card that has at least this much memory; what follows from
    it and why is in docs/decisions/0006-the-assumed-card.md.

    Args:
        total_bytes: The size that was given; the result has exactly this much.
    """
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


@functools.cache
def _rows() -> tuple[tuple[Gpu, tuple[str, ...]], ...]:
    """Return each card with the further names that it goes by."""
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
    """Map every way to write a card to the canonical names that it may mean."""
    names: dict[str, tuple[str, ...]] = {}
    for gpu, also in _rows():
        keys = {_key(text) for text in (gpu.name, gpu.title, *also)}
        with_class = {f"{key}{gpu.memory_class_gb}" for key in keys}
        for key in keys | with_class | {f"{key}gb" for key in with_class}:
            names[key] = (*names.get(key, ()), gpu.name)
    # The canonical name always means its own row, whatever else is called so.
    return names | {_key(gpu.name): (gpu.name,) for gpu in all_gpus()}


def _key(text: str) -> str:
    return _VENDOR_WORDS.sub("", _letters_and_digits(text))


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _nearest(text: str) -> list[str]:
    """Return the three names most like a text, read with and without its RTX."""

    def likeness(gpu: Gpu) -> float:
        return max(
            difflib.SequenceMatcher(None, write(text), write(gpu.name)).ratio()
            for write in (_key, _letters_and_digits)
        )

    return [gpu.name for gpu in heapq.nlargest(3, all_gpus(), key=likeness)]


def _with_memory(gpu: Gpu, total_bytes: int, total_source: str) -> Gpu:
    # Within 10 % it is the same card on another machine; beyond, another amount of
    # memory was soldered or only a part of it is visible.
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
    """Return ``model`` with so many multiprocessors, and rates to match."""
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
