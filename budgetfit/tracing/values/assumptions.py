"""Assumed values of data-dependent ops whose inputs are unknown in a trace.

Masks are full, choices are spread evenly, numbers are finite. A rule gives the value of
an op's output; what is computed from it is propagated like any other known value, and a
note reports the assumption once a model reads it. See
``docs/decisions/0010-known-values.md``.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from budgetfit.tracing.isolation.scalar_randomness import pinned_draw

FULL_MASK = (
    "masks made from unknown values are taken as all true, and questions about them "
    "are answered with yes: an upper bound where a yes computes more"
)
EVEN_CHOICE = (
    "choices that depend on weights (top-k, argmax, sort; routing to experts) are "
    "taken as spread evenly: exact for all experts together, while a skewed router "
    "takes more in one of them"
)
RANDOM_CHOICE = (
    "random whole numbers are taken as the largest where one is drawn, and as spread "
    "evenly where many are"
)
ALL_DIFFERENT = (
    "unknown values are taken as all different where they are compared or counted "
    "(unique, equal): an upper bound for their number"
)
READ_NUMBER = (
    "numbers that are read out of results (.item(), .numpy()) are taken as 1.0: sizes "
    "that are computed from them are estimates"
)
ANSWERED_NO = (
    "masks made from unknown values are taken as all true, but questions about them "
    "are answered with no, and numbers that are read out of results (.item()) taken as "
    "0.0: with yes and 1.0 fewer blocks run"
)
aten = torch.ops.aten


class AssumedValue(NamedTuple):
    """The assumed value of an output; ``why`` is the note, empty if none is needed."""

    output: torch.Tensor
    value: torch.Tensor
    why: str = ""


def _uniform(
    value: bool | float, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return one value for all elements, expanded with stride 0."""
    return torch.tensor(value, dtype=dtype).expand(like.shape)


def _full(out: torch.Tensor, *_: object, **__: object) -> AssumedValue | None:
    """Assume that a comparison is true everywhere."""
    return AssumedValue(out, _uniform(True, out, torch.bool), FULL_MASK)


def _false(out: torch.Tensor, *_: object, **__: object) -> AssumedValue | None:
    """Assume finite numbers: ``isnan`` and ``isinf`` are false."""
    return AssumedValue(out, _uniform(False, out, torch.bool))


def _equal(
    out: torch.Tensor, one: object, other: object, **_: object
) -> AssumedValue | None:
    """Evaluate ``x == x`` and ``x == inf`` for finite x; other results are masks."""
    if one is other:
        return AssumedValue(out, _uniform(True, out, torch.bool))
    if isinstance(other, float) and other in {float("inf"), float("-inf")}:
        return AssumedValue(out, _uniform(False, out, torch.bool))
    if out.numel() == 1:
        return AssumedValue(out, _uniform(False, out, torch.bool), ALL_DIFFERENT)
    return AssumedValue(out, _uniform(True, out, torch.bool), FULL_MASK)


def _not_equal(
    out: torch.Tensor, one: object, other: object, **_: object
) -> AssumedValue | None:
    if one is other:
        return AssumedValue(out, _uniform(False, out, torch.bool))
    if isinstance(other, float) and other in {float("inf"), float("-inf")}:
        return AssumedValue(out, _uniform(True, out, torch.bool))
    return _full(out)


def to_bool(out: torch.Tensor, *_: object, **kwargs: object) -> AssumedValue | None:
    """Assume that a cast to bool is true everywhere; other casts have no rule."""
    return _full(out) if kwargs.get("dtype") is torch.bool else None


def evenly_spread(shape: torch.Size, dim: int, classes: int) -> torch.Tensor:
    """Return indices below ``classes``: each row continues where the last one ended."""
    # Within a row no class occurs twice as long as there are enough.
    dim %= max(len(shape), 1)
    moved = [*shape[:dim], *shape[dim + 1 :], *shape[dim : dim + 1]]
    count = 1
    for size in moved:
        count *= size
    values = torch.arange(count).remainder(max(classes, 1)).reshape(moved)
    return values.movedim(-1, dim) if len(shape) else values


def _topk(
    out: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    _count: int,
    dim: int = -1,
    *_: object,
    **__: object,
) -> AssumedValue | None:
    index = out[1]
    if not x.dim() or index.numel() > MAX_CHOICES:
        return None
    spread = evenly_spread(index.shape, dim, x.shape[dim])
    return AssumedValue(index, spread, EVEN_CHOICE)


def _sort(
    out: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    dim: int = -1,
    *_: object,
    **__: object,
) -> AssumedValue | None:
    """Assume that each row's order is that of the previous row, rotated by one."""
    index = out[1]
    if not x.dim() or index.numel() > MAX_CHOICES:
        return None
    dim %= x.dim()
    size = x.shape[dim]
    rows = torch.arange(max(index.numel() // max(size, 1), 1))[:, None]
    values = (rows + torch.arange(size)).remainder(max(size, 1))
    moved = [*x.shape[:dim], *x.shape[dim + 1 :], size]
    return AssumedValue(index, values.reshape(moved).movedim(-1, dim), EVEN_CHOICE)


def _argmax(
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    dim: int | None = None,
    *_: object,
    **__: object,
) -> AssumedValue | None:
    index = out[1] if isinstance(out, tuple) else out
    if not x.dim() or index.numel() > MAX_CHOICES:
        return None
    classes = x.numel() if dim is None else x.shape[dim]
    values = torch.arange(index.numel()).remainder(max(classes, 1))
    return AssumedValue(index, values.reshape(index.shape), EVEN_CHOICE)


def _multinomial(
    out: torch.Tensor, x: torch.Tensor, *_: object, **__: object
) -> AssumedValue:
    return AssumedValue(out, evenly_spread(out.shape, -1, x.shape[-1]), RANDOM_CHOICE)


def _randint(out: torch.Tensor, *args: object, **_: object) -> AssumedValue | None:
    """``randint`` and ``randint_like``: the bounds are the whole numbers, low first."""
    if out.numel() > MAX_CHOICES or out.is_floating_point():
        return None
    low, high = (0, *(value for value in args if isinstance(value, int)))[-2:]
    if out.numel() == 1:
        value = torch.full(out.shape, high - 1, dtype=out.dtype)
    else:
        value = torch.arange(out.numel()).remainder(max(high - low, 1)) + low
    return AssumedValue(out, value.to(out.dtype).reshape(out.shape), RANDOM_CHOICE)


def _randperm(out: torch.Tensor, *_: object, **__: object) -> AssumedValue | None:
    if out.numel() > MAX_CHOICES:
        return None
    return AssumedValue(out, torch.arange(out.numel(), dtype=out.dtype), RANDOM_CHOICE)


def _rand(out: torch.Tensor, *_: object, **__: object) -> AssumedValue | None:
    if out.numel() != 1:
        return None
    return AssumedValue(out, torch.full(out.shape, pinned_draw(), dtype=out.dtype))


def _empty(out: torch.Tensor, *_: object, **__: object) -> AssumedValue | None:
    """Track small integer buffers that are written element by element later."""
    if out.is_floating_point() or out.is_complex() or out.numel() > MAX_WRITTEN:
        return None
    return AssumedValue(out, torch.zeros(out.shape, dtype=out.dtype))


MAX_CHOICES = 1 << 20
MAX_WRITTEN = 4096  # elements of a buffer that is written one by one

ASSUMPTIONS: dict[OpOverload, Callable[..., AssumedValue | None]] = {
    **{
        op: _full
        for packet in (aten.gt, aten.ge, aten.lt, aten.le)
        for op in (packet.Scalar, packet.Tensor)
    },
    **dict.fromkeys((aten.eq.Scalar, aten.eq.Tensor), _equal),
    **dict.fromkeys((aten.ne.Scalar, aten.ne.Tensor), _not_equal),
    **dict.fromkeys((aten.isnan.default, aten.isinf.default), _false),
    aten._to_copy.default: to_bool,
    aten.topk.default: _topk,
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _sort),
    **dict.fromkeys((aten.max.dim, aten.min.dim), _argmax),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default), _argmax),
    aten.multinomial.default: _multinomial,
    **dict.fromkeys((aten.randint.default, aten.randint.low), _randint),
    **dict.fromkeys((aten.randint_like.default, aten.randint_like.low_dtype), _randint),
    aten.randperm.default: _randperm,
    aten.rand.default: _rand,
    aten.empty.memory_format: _empty,
    aten.new_empty.default: _empty,
}
# The negation of a mask that is assumed to be full may be full as well.
NEGATIONS = frozenset({aten.logical_not.default, aten.bitwise_not.default})
# What differs nowhere by such masks: ``(pixels == 0).sum((1, 2, 3)) != size``.
DIFFERENCES = frozenset({aten.ne.Scalar, aten.ne.Tensor})
