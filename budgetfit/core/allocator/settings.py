"""``AllocatorSettings``: what ``PYTORCH_ALLOC_CONF`` says about device memory."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final

from budgetfit.core.allocator.parse_settings import INTERVALS, parse_values
from budgetfit.errors import InputError

# The first one that is set is read, and no other
# (``AcceleratorAllocatorConfig::instance`` in ``c10/core/AllocatorConfig.cpp``).
VARIABLES: Final = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
VARIABLE: Final = VARIABLES[2]  # the one to set; the others are older names
_MIB: Final = 1 << 20
_LARGE_SEGMENT_BYTES: Final = 20 * _MIB
_OWN_SEGMENT_FROM_MIB: Final = 10  # kMinLargeAlloc
_BYTES_BY_KEY: Final = {
    "large_segment_size_mb": "large_segment_bytes",
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
}
_SAME_NAME: Final = (
    "expandable_segments",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "per_process_memory_fraction",
    "throw_on_cudamalloc_oom",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The settings of PyTorch's caching allocator that change device memory.

    Meaning and limits: ``c10/core/AllocatorConfig.h``,
    ``c10/cuda/CUDAAllocatorConfig.h`` and ``docs/source/notes/cuda.rst`` of torch 2.13.

    Attributes:
        expandable_segments: Segments grow by pages, instead of new ones being taken.
        max_split_bytes: Blocks of that size on are not split; None: all are.
        max_non_split_rounding_bytes: Such a block serves requests that are smaller by
            less than this; None: ``large_segment_bytes``.
        large_segment_bytes: Segment size of requests from 1 to 10 MiB.
        roundup_power2_divisions: Requests are rounded up to a power of two divided by
            this; one for each power of two from 1 MiB to 32 GiB, or empty: to 512
            bytes.
        garbage_collection_threshold: From this share of the memory that the process may
            take, cached segments are released before a new one is taken. torch reads
            it only where ``per_process_memory_fraction`` is below 1.
        per_process_memory_fraction: Share of the card that the process may take.
        throw_on_cudamalloc_oom: Out of memory is raised where the cache would be
            emptied to make room.
        others: Settings that change no device memory, as they were written.

    Raises:
        InputError: PyTorch would refuse a value.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    large_segment_bytes: int = _LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    others: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for why in self._faults():
            raise InputError(
                f"The allocator setting {why}. It is what {VARIABLE} may say, for "
                'example "expandable_segments:True".'
            )

    def _faults(self) -> tuple[str, ...]:
        """Return what PyTorch would refuse."""
        large = self.large_segment_bytes
        least = large // _MIB
        found = []
        if large <= _OWN_SEGMENT_FROM_MIB * _MIB:
            found.append(
                f"large_segment_size_mb:{least} must be above {_OWN_SEGMENT_FROM_MIB}"
            )
        for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
            size = getattr(self, _BYTES_BY_KEY[key])
            if size is not None and size < large:
                found.append(f"{key}:{size // _MIB} must be at least {least} (MiB)")
        divisions = self.roundup_power2_divisions
        if any(each < 0 or each & (each - 1) for each in divisions):
            found.append("roundup_power2_divisions must have powers of two")
        elif len(divisions) not in {0, INTERVALS}:
            found.append(f"roundup_power2_divisions must have {INTERVALS} values")
        threshold = self.garbage_collection_threshold
        if not 0 <= threshold < 1:
            found.append(
                f"garbage_collection_threshold:{threshold:g} must be between 0 and 1"
            )
        fraction = self.per_process_memory_fraction
        if not 0 <= fraction <= 1:
            found.append(
                f"per_process_memory_fraction:{fraction:g} must be from 0 to 1"
            )
        return tuple(found)

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the value of the variable as PyTorch does.

        Raises:
            InputError: PyTorch would refuse it, or it asks for another allocator.
        """
        if not isinstance(text, str):
            raise InputError(
                "allocator must be text such as 'expandable_segments:True' or an "
                f"AllocatorSettings; got {text!r:.60}."
            )
        try:
            values = parse_values(text)
        except ValueError as error:
            raise InputError(
                f"PyTorch would refuse the allocator settings {text!r:.80}: {error}. "
                f"Correct them here, and where {VARIABLE} is set."
            ) from None
        return cls.of(values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> AllocatorSettings:
        """Return settings from the values that ``parse_values`` read."""
        left = dict(values)
        backend = left.pop("backend", "native")
        if backend != "native":
            raise InputError(
                f"backend:{backend} is not modelled: there the driver decides what is "
                "reserved, not PyTorch's allocator. Plan without it, and train with "
                f"{VARIABLE}=backend:native."
            )
        fields: dict[str, Any] = {
            key: left.pop(key) for key in _SAME_NAME if key in left
        }
        if fields.get("garbage_collection_threshold") == 0:
            raise InputError(
                "PyTorch would refuse garbage_collection_threshold:0: it must be "
                "between 0 and 1."
            )
        for key, name in _BYTES_BY_KEY.items():
            if key in left:
                fields[name] = left.pop(key) * _MIB
        others = ",".join(f"{key}:{value}" for key, value in left.items())
        return cls(**fields, others=others)

    @property
    def text(self) -> str:
        """The value to give the variable; empty for the defaults."""
        parts = ["expandable_segments:True"] if self.expandable_segments else []
        if self.large_segment_bytes != _LARGE_SEGMENT_BYTES:
            parts.append(f"large_segment_size_mb:{self.large_segment_bytes // _MIB}")
        for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
            size = getattr(self, _BYTES_BY_KEY[key])
            if size is not None:
                parts.append(f"{key}:{size // _MIB}")
        if any(self.roundup_power2_divisions):
            parts.append(f"roundup_power2_divisions:{self._divisions_text()}")
        if self.garbage_collection_threshold:
            threshold = self.garbage_collection_threshold
            parts.append(f"garbage_collection_threshold:{threshold}")
        if self.per_process_memory_fraction != 1:
            fraction = self.per_process_memory_fraction
            parts.append(f"per_process_memory_fraction:{fraction}")
        if self.throw_on_cudamalloc_oom:
            parts.append("throw_on_cudamalloc_oom:True")
        return ",".join([*parts, self.others] if self.others else parts)

    @property
    def shell_text(self) -> str:
        """``text`` as a shell takes it: a list has characters that it would read."""
        return shlex.quote(self.text)

    def _divisions_text(self) -> str:
        """One number, or a list that names the last interval of each run of equals."""
        runs = [
            (value, [index for index, _ in run])
            for value, run in groupby(
                enumerate(self.roundup_power2_divisions), key=lambda row: row[1]
            )
        ]
        if len(runs) == 1:
            return str(runs[0][0])
        first, *middle, last = runs
        rows = [f"{1 << first[1][-1]}:{first[0]}"]
        rows += [f"{1 << index}:{value}" for value, run in middle for index in run]
        return f"[{','.join([*rows, f'>:{last[0]}'])}]"

    def with_expandable_segments(self) -> AllocatorSettings:
        """Return these settings and ``expandable_segments:True``."""
        return replace(self, expandable_segments=True)

    @property
    def is_default(self) -> bool:
        """Whether device memory is what it is without settings."""
        return self == DEFAULT_SETTINGS

    def allowed_bytes(self, card_bytes: int) -> int:
        """Return what the process may reserve of a card."""
        return int(self.per_process_memory_fraction * card_bytes)

    def within(self, limit_bytes: int, card_bytes: int) -> int:
        """Return what the process may reserve of a limit; all if that is no card's."""
        if limit_bytes > card_bytes:
            return limit_bytes
        return min(limit_bytes, self.allowed_bytes(card_bytes))

    def collect_above_bytes(self, card_bytes: int) -> int | None:
        """Return from where on cached segments are released early; None: never."""
        if (
            not self.garbage_collection_threshold
            or self.per_process_memory_fraction == 1
        ):
            return None
        return int(self.garbage_collection_threshold * self.allowed_bytes(card_bytes))


DEFAULT_SETTINGS: Final = AllocatorSettings()


def variable_in(environment: Mapping[str, str]) -> str | None:
    """Return the name of the variable that PyTorch reads; None: none is set."""
    return next((name for name in VARIABLES if name in environment), None)
