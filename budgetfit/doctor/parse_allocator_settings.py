"""Parse ``PYTORCH_ALLOC_CONF`` as PyTorch does, to report values that it rejects.

Keys, limits and order of the variables are those of torch 2.13
(``c10/core/AllocatorConfig.h``, ``c10/cuda/CUDAAllocatorConfig.h``); tests compare with
torch.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

# In order of precedence; only the first one set is read (the second on ROCm only).
NAMES: Final = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
_LIKE_A_NAME: Final = 0.8


class Settings(NamedTuple):
    """One parsed variable: values by key, and errors for what torch rejects."""

    values: Mapping[str, str]
    errors: tuple[str, ...]


def read_settings(text: str) -> Settings:
    """Parse the text of a variable; returns values and errors."""
    values: dict[str, str] = {}
    errors = []
    # Commas inside brackets belong to a list: roundup_power2_divisions:[256:1,512:2].
    for part in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
        if not part:
            continue
        key, colon, value = part.partition(":")
        if not colon:
            right = part.replace("=", ":") if "=" in part else f"{part}:VALUE"
            errors.append(f"{part!r} has no colon: write {right}")
            continue
        values[key] = value
        errors += _refused(key, value)
    return Settings(values, tuple(errors))


def mistyped_names(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield misspelt variable names, each with the correct one."""
    for name in environment:
        if name in NAMES or name.upper() in _OTHERS:
            continue
        near = difflib.get_close_matches(name.upper(), NAMES, n=1, cutoff=_LIKE_A_NAME)
        if near:
            yield name, near[0]


def _refused(key: str, value: str) -> Iterator[str]:
    """Yield why torch rejects a value; nothing if it accepts it."""
    if key not in _KEYS:
        near = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f" (near: {near[0]})" if near else ""
        yield f"{key!r} is no setting{hint}"
        return
    try:
        fault = _KEYS[key](value)
    except ValueError:
        fault = "is no number"
    if fault:
        yield f"{key}:{value} {fault}"


def _flag(value: str) -> str:
    return "" if value in {"True", "False"} else "must be True or False, so written"


def _share(value: str) -> str:
    return "" if 0 < float(value) < 1 else "must be between 0 and 1"


def _fraction(value: str) -> str:
    return "" if 0 <= float(value) <= 1 else "must be from 0 to 1"


def _mib_from(least: int) -> Callable[[str], str]:
    def fault(value: str) -> str:
        return "" if int(value) >= least else f"must be at least {least} (MiB)"

    return fault


def _backend(value: str) -> str:
    known = value in {"native", "cudaMallocAsync"}
    return "" if known else "must be native or cudaMallocAsync"


def _divisions(value: str) -> str:
    for number in re.findall(r"(?:^|:)(\d+)", value):
        if int(number) & (int(number) - 1):
            return "must be powers of two"
    return ""


def _any(value: str) -> str:
    int(value)
    return ""


_KEYS: Final[Mapping[str, Callable[[str], str]]] = {
    "backend": _backend,
    "max_split_size_mb": _mib_from(20),
    "max_non_split_rounding_mb": _mib_from(20),
    "large_segment_size_mb": _mib_from(11),
    "garbage_collection_threshold": _share,
    "roundup_power2_divisions": _divisions,
    "expandable_segments": _flag,
    "expandable_segments_reserve": lambda _: "",
    "expandable_segments_reserve_by_class": lambda _: "",
    "per_process_memory_fraction": _fraction,
    "release_lock_on_cudamalloc": _flag,
    "release_lock_on_hipmalloc": _flag,
    "pinned_use_cuda_host_register": _flag,
    "pinned_use_hip_host_register": _flag,
    "pinned_use_background_threads": _flag,
    "pinned_num_register_threads": _any,
    "pinned_reserve_segment_size_mb": _any,
    "pinned_free_catch_all": _flag,
    "pinned_max_round_threshold_mb": _any,
    "pinned_max_cached_size_mb": _any,
    "graph_capture_record_stream_reuse": _flag,
    "throw_on_cudamalloc_oom": _flag,
}
# Valid names that are similar to the ones above.
_OTHERS: Final = frozenset(
    {
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "PYTORCH_XPU_ALLOC_CONF",
        "PYTORCH_MPS_ALLOC_CONF",
    }
)
