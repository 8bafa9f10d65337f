"""Assumed results of data-dependent ops: nonzero, unique, bincount, item, CTC loss.

The result is concrete where possible, and on meta where only its shape can be told: an
upper bound. Without a rule for an op, ``KnownValues`` raises ``UnknownValueError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._ops import OpOverload

from budgetfit.tracing.values.assumptions import (
    ALL_DIFFERENT,
    FULL_MASK,
    MAX_CHOICES,
    READ_NUMBER,
)

if TYPE_CHECKING:
    Values = Callable[[torch.Tensor], torch.Tensor | None]

aten = torch.ops.aten


class AssumedResult(NamedTuple):
    """An op's result, and the note on what was assumed for it."""

    result: Any
    why: str = ""


def nonzero_of_full_mask(shape: torch.Size) -> torch.Tensor:
    """Return ``nonzero`` of a full mask, on meta if that is a long list."""
    count = shape.numel()
    if count <= MAX_CHOICES:
        return torch.ones(shape, dtype=torch.bool).nonzero()
    return unlisted_places(count, len(shape))


def unlisted_places(count: int, dims: int) -> torch.Tensor:
    """Return ``nonzero`` of so many elements, on meta: a long list."""
    return torch.empty_strided(
        (count, dims), (1, count), dtype=torch.int64, device="meta"
    )


def _number(_: Values, x: torch.Tensor) -> AssumedResult | None:
    if x.dtype == torch.bool:
        return AssumedResult(True, FULL_MASK)
    return AssumedResult(1.0, READ_NUMBER) if x.is_floating_point() else None


def _yes(_: Values, _x: torch.Tensor) -> AssumedResult:
    return AssumedResult(True, FULL_MASK)


def _no(_: Values, *_args: object, **_kwargs: object) -> AssumedResult:
    return AssumedResult(False, ALL_DIFFERENT)


def _positions(_: Values, x: torch.Tensor) -> AssumedResult:
    return AssumedResult(nonzero_of_full_mask(x.shape), FULL_MASK)


def _unique(
    _: Values,
    x: torch.Tensor,
    inverse: bool = False,
    counts: bool = False,
    dim: int | None = None,
) -> AssumedResult | None:
    if dim is not None:
        return None
    count = x.numel()
    nothing = torch.empty(0, dtype=torch.int64)
    return AssumedResult(
        (
            torch.empty(count, dtype=x.dtype, device="meta"),
            torch.arange(count).reshape(x.shape) if inverse else nothing,
            torch.ones(count, dtype=torch.int64) if counts else nothing,
        ),
        ALL_DIFFERENT,
    )


def _unique2(
    values: Values,
    x: torch.Tensor,
    _sorted: bool = True,
    inverse: bool = False,
    counts: bool = False,
) -> AssumedResult | None:
    return _unique(values, x, inverse, counts)


def _bincount(
    values: Values,
    x: torch.Tensor,
    weights: torch.Tensor | None = None,
    minlength: int = 0,
) -> AssumedResult | None:
    """Return unknown counts for a known number of bins."""
    dtype = torch.int64 if weights is None else torch.float64
    known = values(x)
    if known is not None:
        minlength = len(torch.bincount(known, minlength=minlength))
    if not minlength:
        return None
    return AssumedResult(torch.empty(minlength, dtype=dtype, device="meta"))


def _repeats(
    _: Values, _x: torch.Tensor, output_size: int | None = None
) -> AssumedResult | None:
    if output_size is None:
        return None
    return AssumedResult(torch.empty(output_size, dtype=torch.int64, device="meta"))


def _ctc_loss(
    values: Values,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    _input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *_: object,
    **__: object,
) -> AssumedResult:
    """Return loss and alpha, which is as wide as the longest target (LossCTC.cu)."""
    lengths, why = values(target_lengths), ""
    if lengths is None:
        longest, why = targets.shape[-1], FULL_MASK
    else:
        longest = int(lengths.max())
    steps, samples = log_probs.shape[0], log_probs.shape[1]
    like: dict[str, Any] = {"dtype": log_probs.dtype, "device": "meta"}
    result = (
        torch.empty(samples, **like),
        torch.empty(samples, steps, 2 * longest + 1, **like),
    )
    return AssumedResult(result, why)


def _packed(
    values: Values, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> AssumedResult:
    """Return the packed rows on meta, and the concrete batch size of each step."""
    known, why = values(lengths), ""
    if known is None:
        longest = x.shape[1 if batch_first else 0]
        known, why = torch.full(lengths.shape, longest), FULL_MASK
    narrow = torch.zeros(*x.shape[:2], 1)
    rows, sizes = aten._pack_padded_sequence.default(narrow, known, batch_first)
    data = torch.empty(len(rows), *x.shape[2:], dtype=x.dtype, device="meta")
    return AssumedResult((data, sizes), why)


ASSUMED_RESULTS: dict[OpOverload, Callable[..., AssumedResult | None]] = {
    aten._local_scalar_dense.default: _number,
    aten.is_nonzero.default: _yes,
    aten.equal.default: _no,
    aten.allclose.default: _no,
    aten.nonzero.default: _positions,
    aten._unique2.default: _unique2,
    aten.unique_consecutive.default: _unique,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeats,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._pack_padded_sequence.default: _packed,
}
# Positions of outputs in host memory, on CUDA as well: C++ reads their values.
HOST_OUTPUTS = {aten._pack_padded_sequence.default: (1,)}
