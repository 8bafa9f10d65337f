"""Hand ``num_items_in_batch`` to what can use it: a model of transformers, or a loss.

transformers divides the sum over this micro-batch by the items of the whole group, so
that micro-batches with different numbers of tokens add up to the large batch's mean.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from budgetfit.applying.loss.call_model import Loss

_NAME = "num_items_in_batch"


def with_num_items(
    model: nn.Module,
    batch: Any,  # noqa: ANN401 - any nesting of tensors
    loss: Loss | None,
    count: int | torch.Tensor | None,
) -> tuple[Any, Loss | None]:
    """Return the batch and the loss that make ``loss_of`` divide by ``count``, if any.

    Raises:
        InputError: If nothing would: the losses would then be added up undivided; or if
            there is nothing to divide by.
    """
    if count is None:
        return batch, loss
    if not isinstance(count, torch.Tensor) and not count > 0:
        raise InputError(
            f"num_items_in_batch must be above zero, got {count}: the loss would be "
            "infinite. Leave out an update in which everything is padding."
        )
    if loss is not None:
        if not _takes(loss):
            raise InputError(
                "The loss= does not take num_items_in_batch. Give it such an argument "
                "and divide a sum by it, or leave it out and pass weight=, the number "
                "of items that each micro-batch's loss is the mean of."
            )
        return batch, functools.partial(loss, **{_NAME: count})
    if not isinstance(batch, Mapping) or not _divides(model):
        raise InputError(
            f"{type(model).__name__} does not divide its loss by num_items_in_batch. "
            "Pass weight= instead: the number of items that each micro-batch's loss is "
            "the mean of."
        )
    return {**batch, _NAME: count}, None


def counted_in(weight: float | None, count: int | torch.Tensor | None) -> str:
    """Say in what a micro-batch is weighed; a count on a card is not waited for."""
    if count is not None:
        known = not isinstance(count, torch.Tensor) or count.device.type == "cpu"
        return f"{_NAME}={int(count)}" if known else _NAME
    return "its samples" if weight is None else "weight="


def _divides(model: nn.Module) -> bool:
    """Whether the model's own loss uses the argument, by the Trainer's test and one."""
    if not _takes(model.forward):
        return False
    own = next((module for module in model.modules() if _is_transformers(module)), None)
    if own is None:
        return _NAME in inspect.signature(model.forward).parameters
    accepts = getattr(own, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    # Any keyword is taken by many forwards, and dropped by those with a loss in them.
    return _takes(own.forward) and "loss_function" in _names_used(type(own).forward)


def _takes(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return _NAME in parameters or any(
        item.kind is item.VAR_KEYWORD for item in parameters.values()
    )


def _is_transformers(module: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def _names_used(forward: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return getattr(code, "co_names", ())
