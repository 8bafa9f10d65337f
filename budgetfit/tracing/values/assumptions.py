"""What is assumed where values decide that a trace cannot know (tracing T8).

Masks are full, choices are spread evenly, numbers are finite. Each rule gives a value
for an op's output where its inputs are unknown; what follows from it is computed like
any other known value, and a note says so once a model asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from budgetfit.tracing.isolation.scalar_randomness import lone_chance

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

FULL_MASK = (
    "masks made from unknown values are taken as all true, and questions about them "
    "are answered with yes: an upper bound where they choose what is computed"
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
aten = torch.ops.aten


class Assumed(NamedTuple):
    """A value of one output; ``why`` is empty where it is no matter of opinion."""

    output: torch.Tensor
    value: torch.Tensor
    why: str = ""


# Gives what is assumed of an output, from the output and the op's arguments.
Rule = "Callable[..., Assumed | None]"


def _uniform(
    value: bool | float, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return one value for all elements, which takes no memory to say."""
    return torch.tensor(value, dtype=dtype).expand(like.shape)


def _full(out: torch.Tensor, *_: object, **__: object) -> Assumed | None:
    """Take a comparison as true."""
    return Assumed(out, _uniform(True, out, torch.bool), FULL_MASK)


def _never(out: torch.Tensor, *_: object, **__: object) -> Assumed | None:
    """Take numbers as finite: training that is not has other problems."""
    return Assumed(out, _uniform(False, out, torch.bool))


def _same(out: torch.Tensor, one: Any, other: Any, **_: object) -> Assumed | None:  # noqa: ANN401
    """Compare with oneself or infinity: finite numbers only; others are masks."""
    if one is other:
        return Assumed(out, _uniform(True, out, torch.bool))
    if isinstance(other, float) and other in {float("inf"), float("-inf")}:
        return Assumed(out, _uniform(False, out, torch.bool))
    if out.numel() == 1:
        return Assumed(out, _uniform(False, out, torch.bool), ALL_DIFFERENT)
    return Assumed(out, _uniform(True, out, torch.bool), FULL_MASK)


def _differs(out: torch.Tensor, one: Any, other: Any, **_: object) -> Assumed | None:  # noqa: ANN401
    if one is other:
        return Assumed(out, _uniform(False, out, torch.bool))
    if isinstance(other, float) and other in {float("inf"), float("-inf")}:
        return Assumed(out, _uniform(True, out, torch.bool))
    return _full(out)


def _to_bool(out: torch.Tensor, *_: object, **kwargs: Any) -> Assumed | None:  # noqa: ANN401
    return _full(out) if kwargs.get("dtype") is torch.bool else None


def spread(shape: torch.Size, dim: int, classes: int) -> torch.Tensor:
    """Return choices among ``classes``: each row goes on where the one before ended.

    Within a row no class comes twice while there are as many.
    """
    dim %= max(len(shape), 1)
    moved = [*shape[:dim], *shape[dim + 1 :], *shape[dim : dim + 1]]
    count = 1
    for size in moved:
        count *= size
    values = torch.arange(count).remainder(max(classes, 1)).reshape(moved)
    return values.movedim(-1, dim) if len(shape) else values


def _top(
    out: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    _count: int,
    dim: int = -1,
    *_: object,
    **__: object,
) -> Assumed | None:
    return _chosen(out[1], x, dim)


def _chosen(index: torch.Tensor, x: torch.Tensor, dim: int) -> Assumed | None:
    if not x.dim() or index.numel() > MOST_CHOICES:
        return None
    return Assumed(index, spread(index.shape, dim, x.shape[dim]), EVEN_CHOICE)


def _sorted(
    out: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    dim: int = -1,
    *_: object,
    **kwargs: Any,  # noqa: ANN401
) -> Assumed | None:
    """Take a row's order as that of its neighbour, turned by one."""
    index, dim = out[1], kwargs.get("dim", dim)
    if not x.dim() or index.numel() > MOST_CHOICES:
        return None
    dim %= x.dim()
    size = x.shape[dim]
    rows = torch.arange(max(index.numel() // max(size, 1), 1))[:, None]
    values = (rows + torch.arange(size)).remainder(max(size, 1))
    moved = [*x.shape[:dim], *x.shape[dim + 1 :], size]
    return Assumed(index, values.reshape(moved).movedim(-1, dim), EVEN_CHOICE)


def _stable_sorted(
    out: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    *_: object,
    **kwargs: Any,  # noqa: ANN401
) -> Assumed | None:
    return _sorted(out, x, kwargs.get("dim", -1))


def _extreme(
    out: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    dim: int,
    keepdim: bool = False,
) -> Assumed | None:
    return _arg_extreme(out[1], x, dim, keepdim)


def _arg_extreme(
    index: torch.Tensor,
    x: torch.Tensor,
    dim: int | None = None,
    keepdim: bool = False,  # noqa: ARG001 - aten's signature
) -> Assumed | None:
    if not x.dim() or index.numel() > MOST_CHOICES:
        return None
    classes = x.numel() if dim is None else x.shape[dim]
    values = torch.arange(index.numel()).remainder(max(classes, 1))
    return Assumed(index, values.reshape(index.shape), EVEN_CHOICE)


def _drawn(out: torch.Tensor, x: torch.Tensor, *_: object, **__: object) -> Assumed:
    return Assumed(out, spread(out.shape, -1, x.shape[-1]), RANDOM_CHOICE)


def _whole_numbers(out: torch.Tensor, low: int, high: int) -> Assumed | None:
    if out.numel() > MOST_CHOICES or out.is_floating_point():
        return None
    if out.numel() == 1:
        value = torch.full(out.shape, high - 1, dtype=out.dtype)
    else:
        value = torch.arange(out.numel()).remainder(max(high - low, 1)) + low
    return Assumed(out, value.to(out.dtype).reshape(out.shape), RANDOM_CHOICE)


def _below(out: torch.Tensor, high: int, *_: object, **__: object) -> Assumed | None:
    return _whole_numbers(out, 0, high)


def _between(
    out: torch.Tensor, low: int, high: int, *_: object, **__: object
) -> Assumed | None:
    return _whole_numbers(out, low, high)


def _like_below(
    out: torch.Tensor, _x: torch.Tensor, high: int, *_: object, **__: object
) -> Assumed | None:
    return _whole_numbers(out, 0, high)


def _like_between(
    out: torch.Tensor, _x: torch.Tensor, low: int, high: int, *_: object, **__: object
) -> Assumed | None:
    return _whole_numbers(out, low, high)


def _order(out: torch.Tensor, *_: object, **__: object) -> Assumed | None:
    if out.numel() > MOST_CHOICES:
        return None
    return Assumed(out, torch.arange(out.numel(), dtype=out.dtype), RANDOM_CHOICE)


def _chance(out: torch.Tensor, *_: object, **__: object) -> Assumed | None:
    if out.numel() != 1:
        return None
    return Assumed(out, torch.full(out.shape, lone_chance(), dtype=out.dtype))


def _written_later(out: torch.Tensor, *_: object, **__: object) -> Assumed | None:
    """Follow what is made to be written to; nobody means to read it before."""
    if out.is_floating_point() or out.is_complex() or out.numel() > MOST_WRITTEN:
        return None
    return Assumed(out, torch.zeros(out.shape, dtype=out.dtype))


MOST_CHOICES = 1 << 20
MOST_WRITTEN = 4096  # number by number

RULES: dict[OpOverload, Callable[..., Assumed | None]] = {
    **{
        op: _full
        for packet in (aten.gt, aten.ge, aten.lt, aten.le)
        for op in (packet.Scalar, packet.Tensor)
    },
    **dict.fromkeys((aten.eq.Scalar, aten.eq.Tensor), _same),
    **dict.fromkeys((aten.ne.Scalar, aten.ne.Tensor), _differs),
    **dict.fromkeys((aten.isnan.default, aten.isinf.default), _never),
    aten._to_copy.default: _to_bool,
    aten.topk.default: _top,
    aten.sort.default: _sorted,
    aten.sort.stable: _stable_sorted,
    aten.max.dim: _extreme,
    aten.min.dim: _extreme,
    aten.argmax.default: _arg_extreme,
    aten.argmin.default: _arg_extreme,
    aten.multinomial.default: _drawn,
    aten.randint.default: _below,
    aten.randint.low: _between,
    aten.randint_like.default: _like_below,
    aten.randint_like.low_dtype: _like_between,
    aten.randperm.default: _order,
    aten.rand.default: _chance,
    aten.empty.memory_format: _written_later,
    aten.new_empty.default: _written_later,
}
# Of a mask that is assumed to be full, the opposite may be as full.
OPPOSITES = frozenset({aten.logical_not.default, aten.bitwise_not.default})
