"""Pass ``num_items_in_batch`` to a transformers model or a loss function.

transformers divides the sum of token losses by the number of items in all accumulated
micro-batches, so that their losses add up to the mean of the large batch.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from budgetfit.applying.loss.call_model import (
    Loss,
    inner_model,
    is_transformers_model,
    uses_loss_function,
)
from budgetfit.errors import InputError

_NAME = "num_items_in_batch"


def pass_num_items(
    model: nn.Module, batch: object, loss: Loss | None, count: int | torch.Tensor | None
) -> tuple[Any, Loss | None]:
    """Return batch and loss that make ``compute_loss`` divide by ``count``, if any.

    Raises:
        InputError: If neither model nor loss takes it, or ``count`` is not above zero.
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
    if not isinstance(batch, Mapping) or not divides_loss(model):
        raise InputError(
            f"{type(model).__name__} does not divide its loss by num_items_in_batch. "
            "Pass weight= instead: the number of items that each micro-batch's loss is "
            "the mean of."
        )
    return {**batch, _NAME: count}, None


def describe_weight(weight: float | None, count: int | torch.Tensor | None) -> str:
    """Return the unit of a micro-batch's weight as text, without a device sync."""
    if count is not None:
        known = not isinstance(count, torch.Tensor) or count.device.type == "cpu"
        return f"{_NAME}={int(count)}" if known else _NAME
    return "its samples" if weight is None else "weight="


def trainer_sums_losses(model: nn.Module) -> bool:
    """Whether transformers' Trainer adds up the losses of an update's micro-batches."""
    # It takes a forward with ``**kwargs`` for one that divides by the number of items
    # in all of them, and divides no more; on several ranks it multiplies by their
    # number.
    find_base = getattr(model, "get_base_model", None)  # of a PEFT model
    asked = find_base() if callable(find_base) else model
    told = hasattr(asked, "accepts_loss_kwargs")
    return not told and _takes_any(asked.forward) and not divides_loss(model)


def divides_loss(model: nn.Module) -> bool:
    """Whether the model's own loss uses the argument; stricter than Trainer's test."""
    model = inner_model(model)
    if not _takes(model.forward):
        return False
    own = next(filter(is_transformers_model, model.modules()), None)
    if own is None:
        return _NAME in inspect.signature(model.forward).parameters
    accepts = getattr(own, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    # Many forwards take **kwargs and drop them if they compute the loss themselves.
    kind: Any = type(own)
    return _takes(own.forward) and _hands_on(kind)


@functools.cache
def _hands_on(model_class: Any) -> bool:
    """Whether a forward gives its ``**kwargs`` to ``self.loss_function``."""
    try:
        source = inspect.getsource(inspect.unwrap(model_class.forward))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return uses_loss_function(model_class)
    return any(
        keyword.arg is None
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "loss_function"
        for keyword in node.keywords
    )


def _takes(function: Callable[..., object]) -> bool:
    return _NAME in inspect.signature(function).parameters or _takes_any(function)


def _takes_any(function: Callable[..., object]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(item.kind is item.VAR_KEYWORD for item in parameters)
