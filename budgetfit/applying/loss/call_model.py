"""Call any model on any batch, and find the scalar to train on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from budgetfit.applying.pytree import tensors_in
from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Loss = Callable[[Any, Any], torch.Tensor]

LABELS = frozenset({"label", "labels", "label_ids"})
_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def loss_of(
    model: nn.Module,
    batch: Any,  # noqa: ANN401
    loss: Loss | None,
    *,
    no_loss: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Run the model and return a scalar to differentiate; the outputs are dropped.

    A mapping fills the model's arguments by name, a tuple or list by position, anything
    else is the one argument. With a ``loss``, what the model does not take is for the
    loss alone: names that it does not know, and of a tuple the elements behind its
    arguments, at least the last one if more came than the model requires.

    Without a ``loss``: the output's ``loss`` where it has one, the first element of a
    tuple from a model that was given ``labels``, or the output itself if it is a
    scalar. Where there is none of these, a plan can still be made: ``no_loss`` is
    called, and the mean of all floating-point outputs taken.

    Raises:
        InputError: If no scalar can be found, or nothing trainable leads to it.
    """
    args, kwargs = arguments_for(model, batch, for_loss=loss is not None)
    outputs = model(*args, **kwargs)
    value = (
        loss(outputs, batch)
        if loss is not None
        else _own_loss(outputs, kwargs, no_loss=no_loss)
    )
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        raise InputError(
            f"The loss must be a scalar tensor, got {got}. For example "
            "loss=lambda outputs, batch: outputs.logits.float().mean()."
        )
    if not value.requires_grad:
        raise InputError(
            "The loss does not depend on any trainable parameter: nothing would train. "
            "Is the model frozen, or the output detached?"
        )
    return value


def arguments_for(
    model: nn.Module,
    batch: Any,  # noqa: ANN401
    *,
    for_loss: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments that ``batch`` means to ``model``."""
    if isinstance(batch, Mapping):
        known = _known_names(model) if for_loss else None
        return (), {
            name: value
            for name, value in batch.items()
            if known is None or name in known
        }
    if isinstance(batch, (tuple, list)):
        return tuple(batch[: _taken(model, len(batch)) if for_loss else None]), {}
    return (batch,), {}


def _known_names(model: nn.Module) -> set[str] | None:
    """Return the argument names of the forward; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters
    if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return None
    return set(parameters)


def _taken(model: nn.Module, count: int) -> int:
    """Return how many of ``count`` elements go to the model, the rest being targets."""
    parameters = inspect.signature(model.forward).parameters.values()
    by_position = [item for item in parameters if item.kind in _BY_POSITION]
    required = sum(item.default is item.empty for item in by_position)
    if count <= required:
        return count
    takes_any = any(item.kind is item.VAR_POSITIONAL for item in parameters)
    return count - 1 if takes_any else min(len(by_position), count - 1)


def _own_loss(
    outputs: Any,  # noqa: ANN401
    kwargs: dict[str, Any],
    *,
    no_loss: Callable[[], object] | None,
) -> Any:  # noqa: ANN401
    """Return the loss that the model computed itself; as ``loss_of`` without one."""
    own = (
        outputs.get("loss")
        if isinstance(outputs, Mapping)
        else getattr(outputs, "loss", None)
    )
    if own is None and isinstance(outputs, tuple) and "labels" in kwargs:
        own = outputs[0]
    if own is not None:
        return own
    floats = _floats_in(outputs)
    if len(floats) == 1 and floats[0].numel() == 1:
        return floats[0]
    if not floats:
        raise InputError(
            f"The model returned {type(outputs).__name__} without a loss or any "
            "floating-point tensor. Hand in loss=, for example "
            "loss=lambda outputs, batch: outputs.sum()."
        )
    if no_loss is None:
        labels = ", or labels in the batch" if kwargs.keys().isdisjoint(LABELS) else ""
        raise InputError(
            f"There is no loss to train on: the model returned {type(outputs).__name__}"
            f" without one. Hand in loss={labels}; for example "
            "loss=lambda outputs, batch: cross_entropy(outputs, batch[1])."
        )
    no_loss()
    return mean_of(outputs)


def mean_of(outputs: Any) -> torch.Tensor:  # noqa: ANN401
    """Return the mean of the means of all floating-point outputs."""
    means = [tensor.mean(dtype=torch.float32) for tensor in _floats_in(outputs)]
    return torch.stack(means).mean()


def _floats_in(outputs: Any) -> list[torch.Tensor]:  # noqa: ANN401
    return [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]


def evaluated(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[Any, Any]:  # noqa: ANN401
    """Run the model as an evaluation does; return its outputs, and the loss if any.

    Labels are in the batch, as in ``Trainer.evaluate``: the loss takes memory, too.

    Args:
        model: Called in the mode and the contexts that it is in.
        batch: As for ``loss_of``.
        loss: As for ``loss_of``.
    """
    args, kwargs = arguments_for(model, batch, for_loss=loss is not None)
    outputs = model(*args, **kwargs)
    return outputs, loss(outputs, batch) if loss is not None else None
