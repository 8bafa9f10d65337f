"""Parse ``PYTORCH_ALLOC_CONF`` as PyTorch does, to report values that it rejects.

Keys, limits and order of the variables are those of torch 2.13
(``c10/core/AllocatorConfig.h``, ``c10/cuda/CUDAAllocatorConfig.h``); tests compare with
torch.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

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
    accepts, fault = _KEYS[key]
    try:
        if not accepts(value):
            yield f"{key}:{value} {fault}"
    except ValueError:
        yield f"{key}:{value} is no number"


def _powers_of_two(value: str) -> bool:
    numbers = map(int, re.findall(r"(?:^|:)(\d+)", value))
    return not any(number & (number - 1) for number in numbers)


# What a value must be: a test, which may raise ValueError, and the words for it.
_Rule: TypeAlias = tuple[Callable[[str], bool], str]
_FLAG: Final[_Rule] = (
    {"True", "False"}.__contains__,
    "must be True or False, so written",
)
_NUMBER: Final[_Rule] = (lambda value: int(value) is not None, "")
_ANY: Final[_Rule] = (lambda _: True, "")


def _mib_from(least: int) -> _Rule:
    return lambda value: int(value) >= least, f"must be at least {least} (MiB)"


_KEYS: Final[Mapping[str, _Rule]] = {
    "backend": (
        {"native", "cudaMallocAsync"}.__contains__,
        "must be native or cudaMallocAsync",
    ),
    "max_split_size_mb": _mib_from(20),
    "max_non_split_rounding_mb": _mib_from(20),
    "large_segment_size_mb": _mib_from(11),
    "garbage_collection_threshold": (
        lambda value: 0 < float(value) < 1,
        "must be between 0 and 1",
    ),
    "roundup_power2_divisions": (_powers_of_two, "must be powers of two"),
    "expandable_segments": _FLAG,
    "expandable_segments_reserve": _ANY,
    "expandable_segments_reserve_by_class": _ANY,
    "per_process_memory_fraction": (
        lambda value: 0 <= float(value) <= 1,
        "must be from 0 to 1",
    ),
    "release_lock_on_cudamalloc": _FLAG,
    "release_lock_on_hipmalloc": _FLAG,
    "pinned_use_cuda_host_register": _FLAG,
    "pinned_use_hip_host_register": _FLAG,
    "pinned_use_background_threads": _FLAG,
    "pinned_num_register_threads": _NUMBER,
    "pinned_reserve_segment_size_mb": _NUMBER,
    "pinned_free_catch_all": _FLAG,
    "pinned_max_round_threshold_mb": _NUMBER,
    "pinned_max_cached_size_mb": _NUMBER,
    "graph_capture_record_stream_reuse": _FLAG,
    "throw_on_cudamalloc_oom": _FLAG,
}
# Valid names that are similar to the ones above.
_OTHERS: Final = (
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_XPU_ALLOC_CONF",
    "PYTORCH_MPS_ALLOC_CONF",
)
