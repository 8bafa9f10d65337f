"""Lazy placeholder for logits, which the chunked loss computes later.

Returning hidden states in place of logits would silently give wrong results. The
placeholder is no tensor: pointwise ops between head and loss are recorded and applied
later, chunk by chunk, and everything else raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from budgetfit.errors import InputError

KEEP_WHOLE = (
    "Plan with loss=lambda outputs, batch: outputs.loss, which keeps it whole, or use "
    "a Recipe with loss_chunks=1."
)


class CannotChunkLossError(InputError):
    """The loss of this model cannot be computed in chunks."""


class _NoLogitsError(CannotChunkLossError, AttributeError):
    """An attribute that the placeholder lacks; also makes ``hasattr`` return False."""


def refuse_chunking(
    reason: str,
    cause: Exception | None = None,
    kind: type[CannotChunkLossError] = CannotChunkLossError,
) -> NoReturn:
    """Raise the error that says why the loss cannot be chunked, and what to do."""
    raise kind(
        f"The loss of this model cannot be cut into parts: {reason}. {KEEP_WHOLE}"
    ) from cause


@dataclass(frozen=True, eq=False, slots=True)
class PointwiseOp:
    """A pointwise function that the model applied to its logits."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the op to real logits."""

        def filled(value: object) -> object:
            return logits if value is _LOGITS else value

        args = [filled(value) for value in self.args]
        kwargs = {name: filled(value) for name, value in self.kwargs.items()}
        return self.function(*args, **kwargs)


_LOGITS = object()  # stands for the logits in recorded arguments


# Elementwise in the logits: Cohere scales, Granite divides, Gemma 2 caps by tanh, older
# code casts to fp32.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "__add__": torch.add,
    "__mul__": torch.mul,
    "__rmul__": torch.mul,
    "__sub__": torch.sub,
    "__truediv__": torch.div,
}
_METHODS = ("add", "clamp", "contiguous", "div", "float", "mul", "sub", "tanh", "to")
_POINTWISE = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(torch.add, torch.clamp, torch.div, torch.mul, torch.sub, torch.tanh),
    }
)
_REFUSED_DUNDERS = ("__bool__", "__getitem__", "__iter__", "__len__", "__matmul__")


class DeferredLogits:
    """The head's input, and the ops to apply to the head's output.

    No dataclass: FSDP2 looks into those of a model's output, and would take the hidden
    states for a result of the model.

    Attributes:
        hidden: Hidden states, [..., positions, width].
        ops: Recorded ops, in order.
    """

    def __init__(self, hidden: torch.Tensor, ops: tuple[PointwiseOp, ...] = ()) -> None:
        self.hidden = hidden
        self.ops = ops

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.hidden.device

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> DeferredLogits:
        """Record a pointwise torch function."""
        del types
        kwargs = kwargs or {}
        values = (*args, *kwargs.values())
        own = [value for value in values if isinstance(value, cls)]
        if func not in _POINTWISE or len(own) != 1 or not all(map(_is_number, values)):
            name = getattr(func, "__name__", func)
            refuse_chunking(f"between its output head and its loss it calls {name}")

        def emptied(value: object) -> object:
            return _LOGITS if value is own[0] else value

        op = PointwiseOp(
            func,
            tuple(map(emptied, args)),
            {name: emptied(value) for name, value in kwargs.items()},
        )
        return DeferredLogits(own[0].hidden, (*own[0].ops, op))

    def __getattr__(self, name: str) -> Any:
        """Return a recording version of a pointwise tensor method."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _METHODS:
            method = getattr(torch.Tensor, name)
            return functools.partial(_call, method, self)
        reason = f"it asks for logits.{name}, and no logits are computed"
        refuse_chunking(reason, kind=_NoLogitsError)


def _call(
    function: Callable[..., object], *args: object, **kwargs: object
) -> DeferredLogits:
    return DeferredLogits.__torch_function__(function, (), args, kwargs)


def _is_number(value: object) -> bool:
    """Whether the argument is a scalar, which keeps the op elementwise."""
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _operator(function: Callable[..., object]) -> Callable[..., DeferredLogits]:
    return lambda *args: _call(function, *args)


def _refusal(name: str) -> Callable[..., NoReturn]:
    return lambda *_: refuse_chunking(f"it uses {name} of logits that are not computed")


for _dunder, _function in _OPERATORS.items():
    setattr(DeferredLogits, _dunder, _operator(_function))
for _dunder in _REFUSED_DUNDERS:
    setattr(DeferredLogits, _dunder, _refusal(_dunder))
