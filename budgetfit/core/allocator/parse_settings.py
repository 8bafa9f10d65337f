"""Parse the text of ``PYTORCH_ALLOC_CONF`` as PyTorch does.

Source: ``ConfigTokenizer`` in ``c10/core/AllocatorConfig.h`` and the ``parse`` methods
of ``AcceleratorAllocatorConfig`` and ``CUDAAllocatorConfig``, torch 2.13; tests compare
with both. PyTorch does not look at what stands between a key and its value, nor between
two settings, and reads numbers up to the first character that is none.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

INTERVALS: Final = 16  # of roundup_power2_divisions: 1 MiB to 32 GiB
_MOST_MIB: Final = (1 << 64) // (1 << 20) - 1
_NUMBERS: Final = 1 << 64  # of C++'s size_t
_MOST_THREADS: Final = 128
_SEPARATORS: Final = re.compile(r"([,:\[\]])")
_SPACE: Final = re.compile(r"[ \t\n\v\f\r]")
_WHOLE: Final = re.compile(r"[+-]?\d+", re.ASCII)
_DECIMAL: Final = re.compile(
    r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE
)


def parse_values(text: str) -> dict[str, Any]:
    """Return the value of each setting: flags, numbers, or text.

    ``roundup_power2_divisions`` has 16 values, one for each power of two from 1 MiB on.

    Raises:
        ValueError: PyTorch would refuse the text; says why.
    """
    tokens = [each for each in _SEPARATORS.split(_SPACE.sub("", text)) if each]
    values: dict[str, Any] = {}
    at = 0
    while at < len(tokens):
        key = tokens[at]
        if key not in _READERS:
            raise ValueError(_unknown(key))
        at += 2
        if at >= len(tokens):
            raise ValueError(f"{key!r:.60} has no value: write {key}:VALUE")
        try:
            values[key], at = _READERS[key](tokens, at)
        except ValueError as error:
            raise ValueError(f"{key}:{tokens[at]:.40} {error}") from None
        at += 2
    return values


def _unknown(key: str) -> str:
    if "=" in key:
        return f"{key!r:.60} has no colon: write {key.replace('=', ':'):.60}"
    near = difflib.get_close_matches(key[:60], _READERS, n=1)
    return f"{key!r:.60} is no setting{f' (near: {near[0]})' if near else ''}"


# A reader takes all tokens and the place of a value; it returns the value and the
# place of its last token.
_Reader = Callable[[Sequence[str], int], tuple[Any, int]]


def _flag(tokens: Sequence[str], at: int) -> tuple[bool, int]:
    if tokens[at] not in {"True", "False"}:
        raise ValueError("must be True or False, so written")
    return tokens[at] == "True", at


def _whole(token: str) -> int:
    found = _WHOLE.match(token)
    if found is None or len(found[0]) > len(str(_NUMBERS)) + 1:
        raise ValueError("is no number")
    number = int(found[0])
    if abs(number) >= _NUMBERS:
        raise ValueError("is no number")
    return number % _NUMBERS  # below zero it wraps around, as in C++


def _number(tokens: Sequence[str], at: int) -> tuple[int, int]:
    return _whole(tokens[at]), at


def _mib(tokens: Sequence[str], at: int) -> tuple[int, int]:
    return min(_whole(tokens[at]), _MOST_MIB), at


def _share(tokens: Sequence[str], at: int) -> tuple[float, int]:
    found = _DECIMAL.match(tokens[at])
    if found is None:
        raise ValueError("is no number")
    return float(found[0]), at


def _positive(tokens: Sequence[str], at: int) -> tuple[int, int]:
    if not (number := _whole(tokens[at])):
        raise ValueError("must be above 0")
    return number, at


def _threads(tokens: Sequence[str], at: int) -> tuple[int, int]:
    number = _whole(tokens[at])
    if not _is_power_of_two(number) or number > _MOST_THREADS:
        raise ValueError(f"must be a power of two, at most {_MOST_THREADS}")
    return number, at


def _backend(tokens: Sequence[str], at: int) -> tuple[str, int]:
    if tokens[at] not in {"native", "cudaMallocAsync"}:
        raise ValueError("must be native or cudaMallocAsync")
    return tokens[at], at


def _any(tokens: Sequence[str], at: int) -> tuple[str, int]:
    start = at
    if tokens[at] == "[":
        at = _closing(tokens, at)
    return "".join(tokens[start : at + 1]), at


def _closing(tokens: Sequence[str], at: int) -> int:
    try:
        return tokens.index("]", at)
    except ValueError:
        raise ValueError("has no closing bracket") from None


def _is_power_of_two(number: int) -> bool:
    return number > 0 and not number & (number - 1)


def _divisions(tokens: Sequence[str], at: int) -> tuple[tuple[int, ...], int]:
    """Read one value for all sizes, or a list of values by MiB."""
    if tokens[at] != "[":
        value = _whole(tokens[at])
        if not _is_power_of_two(value):
            raise ValueError("must be a power of two")
        return (value,) * INTERVALS, at
    divisions = [0] * INTERVALS
    last: int | None = None
    end = _closing(tokens, at)
    # Size, a colon, value and a comma: what stands for the signs is not looked at.
    for place in range(at + 1, end, 4):
        value = _whole(tokens[min(place + 2, end)])
        if value and not _is_power_of_two(value):
            raise ValueError(f"has {value}, which must be a power of two or 0")
        if tokens[place] == ">":
            start = (last or 0) + 1
            divisions[start:] = [value] * (INTERVALS - start)
            continue
        mib = _whole(tokens[place])
        if not _is_power_of_two(mib):
            raise ValueError(f"has sizes up to {mib} MiB, which must be powers of two")
        index = min(mib.bit_length() - 1, INTERVALS - 1)
        if last is None:
            divisions[:index] = [value] * index
        divisions[index] = value
        last = index
    return tuple(divisions), end


_READERS: Final[Mapping[str, _Reader]] = {
    "backend": _backend,
    "expandable_segments": _flag,
    # Of later versions; they size address ranges, not memory.
    "expandable_segments_reserve": _any,
    "expandable_segments_reserve_by_class": _any,
    "garbage_collection_threshold": _share,
    "graph_capture_record_stream_reuse": _flag,
    "large_segment_size_mb": _mib,
    "max_non_split_rounding_mb": _mib,
    "max_split_size_mb": _mib,
    "per_process_memory_fraction": _share,
    "pinned_free_catch_all": _flag,
    "pinned_max_cached_size_mb": _number,
    "pinned_max_round_threshold_mb": _number,
    "pinned_num_register_threads": _threads,
    "pinned_reserve_segment_size_mb": _positive,
    "pinned_use_background_threads": _flag,
    "pinned_use_cuda_host_register": _flag,
    "pinned_use_hip_host_register": _flag,
    "release_lock_on_cudamalloc": _flag,
    "release_lock_on_hipmalloc": _flag,
    "roundup_power2_divisions": _divisions,
    "throw_on_cudamalloc_oom": _flag,
}
