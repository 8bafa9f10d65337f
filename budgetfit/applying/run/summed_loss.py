"""Tell a loss that is a sum over samples by its graph."""

from collections.abc import Iterator
from typing import Any, Final

import torch

_OF_TERMS: Final = ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0")
_MEANS: Final = ("MeanBackward0", "MeanBackward1", "DivBackward0")
_MEAN, _SUM = 1, 2  # torch's numbers for reduction=


def is_sum(loss: torch.Tensor, samples: float) -> bool:
    """Whether a loss is surely a sum over its samples; False also where unknown.

    Surely: one of its terms is made with ``reduction="sum"``, or by ``sum()`` of a
    tensor with a row for each sample, and no term is a mean.
    """
    kinds = {_kind(node, samples) for node in _terms(loss.grad_fn)}
    return _SUM in kinds and _MEAN not in kinds


def _terms(node: Any) -> Iterator[Any]:
    if type(node).__name__ not in _OF_TERMS:
        yield node
        return
    for inner, _ in node.next_functions:
        if inner is not None:
            yield from _terms(inner)


def _kind(node: Any, samples: float) -> int | None:
    name = type(node).__name__
    if name in _MEANS:
        return _MEAN
    if name in ("SumBackward0", "SumBackward1"):
        sizes = tuple(node._saved_self_sym_sizes)
        # A vector may hold a loss for each of several tasks.
        return _SUM if len(sizes) > 1 and sizes[0] == samples else None
    return getattr(node, "_saved_reduction", None)
