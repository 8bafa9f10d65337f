"""Ops whose kernel memory was verified against PyTorch's CUDA host code, by call."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from budgetfit.core.step_trace import TO_DEVICE, TO_HOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload

VOLUME = 5  # dimensions of a batch of 3-D images
LONG_ROW = 1024  # from here on several thread blocks share a row
HALF_BYTES = 2


@cache
def verified_ops() -> frozenset[str]:
    """Return their names, like ``mm.default``; the file says how they were verified."""
    text = files(__package__).joinpath("verified_ops.txt").read_text("utf-8")
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return frozenset(line[0] for line in lines if line)


def is_verified(func: OpOverload, args: tuple[Any, ...] = ()) -> bool:
    """Return whether a call's memory is verified; outside aten only our host copies."""
    if str(func) in (TO_HOST, TO_DEVICE):  # a copy allocates its output only
        return True
    name = str(func).partition(".")[2]
    if func.namespace != "aten" or name not in verified_ops():
        return False
    outside = UNKNOWN_CALLS.get(name.partition(".")[0])
    return outside is None or not args or not outside(*args)


def _long_rows(x: Tensor, _count: int, dim: int = -1, *_: object) -> bool:
    return bool(x.dim() and x.shape[dim] >= LONG_ROW)


def _short_keys(x: Tensor, *_: object) -> bool:
    return x.element_size() <= HALF_BYTES


def _volume_with_last_channels(x: Tensor, *_: object) -> bool:
    return x.dim() == VOLUME and not x.is_contiguous()


def _without_range(_x: Tensor, _bins: int = 0, low: float = 0, high: float = 0) -> bool:
    return low == high


# Calls that the rules of a verified op do not cover.
UNKNOWN_CALLS: dict[str, Callable[..., bool]] = {
    "topk": _long_rows,
    "sort": _short_keys,
    "cumsum": _short_keys,
    "histc": _without_range,
    "native_batch_norm": _volume_with_last_channels,
    "native_batch_norm_backward": _volume_with_last_channels,
}
