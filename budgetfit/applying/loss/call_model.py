"""Call any model on any batch and find the scalar loss."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from budgetfit.applying.pytree import tensors_in
from budgetfit.errors import InputError

Loss = Callable[[Any, Any], torch.Tensor]

LABELS = frozenset({"label", "labels", "label_ids"})
# What wraps a model takes anything and hands it on. By class names: importing the
# classes is slow.
_INNER_OF_WRAPPERS = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
}
_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def compute_loss(
    model: nn.Module,
    batch: object,
    loss: Loss | None,
    *,
    on_missing_loss: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Run the model and return the scalar loss; the outputs are dropped.

    A mapping is passed as keyword arguments, a tuple or list as positional ones,
    anything else as the only argument. With a ``loss``, the model gets only the names
    that its forward takes, and of a tuple as many elements as it has arguments, without
    the last one if there are more than it requires.

    Without a ``loss``: the output's ``loss`` if it has one, the first element of a
    tuple from a model that was given ``labels``, or the output itself if it is a
    scalar. Otherwise ``on_missing_loss`` is called, so that a plan can still be made,
    and the loss is the mean of all floating-point outputs.

    Raises:
        InputError: If there is no scalar, or it depends on no trainable parameter.
    """
    outputs = call_model(model, batch, for_loss=loss is not None)
    return find_loss(outputs, batch, loss, on_missing_loss)


def call_model(model: nn.Module, batch: object, *, for_loss: bool) -> object:
    """Run the model on a batch as ``compute_loss`` does; return its outputs."""
    args, kwargs = model_arguments(model, batch, for_loss=for_loss)
    return model(*args, **kwargs)


def find_loss(
    outputs: object,
    batch: object,
    loss: Loss | None,
    on_missing_loss: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Return the scalar loss of ``outputs``, as described at ``compute_loss``."""
    value = (
        loss(outputs, batch)
        if loss is not None
        else _own_loss(outputs, batch, on_missing_loss=on_missing_loss)
    )
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        example = " + ".join(_scalars(outputs)) or "outputs.logits.float().mean()"
        taken = (
            "outputs[0], which is taken as the loss where the batch has labels, "
            if isinstance(outputs, tuple) and value is outputs[0]
            else ""
        )
        raise InputError(
            f"The loss must be a scalar tensor, got {taken}{described(value)}. "
            f"For example loss=lambda outputs, batch: {example}."
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise InputError(
            "The loss does not depend on any trainable parameter: nothing would train. "
            "Is the model frozen, or the output detached?"
        )
    return value


def model_arguments(
    model: nn.Module, batch: object, *, for_loss: bool
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of ``model`` for ``batch``."""
    if isinstance(batch, Mapping):
        known = _argument_names(model) if for_loss else None
        return (), {
            name: value
            for name, value in batch.items()
            if known is None or name in known
        }
    if isinstance(batch, (tuple, list)):
        return tuple(
            batch[: _argument_count(model, len(batch)) if for_loss else None]
        ), {}
    return (batch,), {}


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP, ``torch.compile`` and others, or itself."""
    kinds = (kind.__name__ for kind in type(model).__mro__)
    names = [_INNER_OF_WRAPPERS[kind] for kind in kinds if kind in _INNER_OF_WRAPPERS]
    return inner_model(getattr(model, names[0])) if names else model


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside of peft's wrapper and of those of ``inner_model``."""
    inner: Any = inner_model(model)
    if callable(find_base := getattr(inner, "get_base_model", None)):
        inner = find_base()
    return inner if inner is model else unwrap_model(inner)


def _argument_names(model: nn.Module) -> set[str] | None:
    """Return the forward's argument names; None if it has ``**kwargs``."""
    # A peft model hands what it is given to its base.
    parameters = inspect.signature(unwrap_model(model).forward).parameters
    if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return None
    return set(parameters)


def _argument_count(model: nn.Module, count: int) -> int:
    """Return how many of ``count`` elements are for the model; the rest are targets."""
    parameters = inspect.signature(inner_model(model).forward).parameters.values()
    by_position = [item for item in parameters if item.kind in _BY_POSITION]
    required = sum(item.default is item.empty for item in by_position)
    if count <= required:
        return count
    takes_any = any(item.kind is item.VAR_POSITIONAL for item in parameters)
    return count - 1 if takes_any else min(len(by_position), count - 1)


def _own_loss(
    outputs: object, batch: object, *, on_missing_loss: Callable[[], object] | None
) -> object:
    """Return the loss in the outputs; as ``compute_loss`` without a ``loss``."""
    kwargs = batch if isinstance(batch, Mapping) else {}
    own = (
        outputs.get("loss")
        if isinstance(outputs, Mapping)
        else getattr(outputs, "loss", None)
    )
    if own is None and isinstance(outputs, tuple) and "labels" in kwargs:
        own = outputs[0]
        _warn_of_other_losses(_scalars(outputs))
    if own is not None:
        return own
    floats = _float_tensors(outputs)
    if len(floats) == 1 and floats[0].dim() == 0:  # not one number of one sample
        return floats[0]
    if not floats:
        raise InputError(
            f"The model returned {type(outputs).__name__} without a loss or any "
            "floating-point tensor. Hand in loss=, for example "
            "loss=lambda outputs, batch: outputs.sum()."
        )
    if on_missing_loss is None:
        labels = ", or labels in the batch" if kwargs.keys().isdisjoint(LABELS) else ""
        example = " + ".join(_scalars(outputs)) or "cross_entropy(outputs, batch[1])"
        raise InputError(
            f"There is no loss to train on: the model returned {type(outputs).__name__}"
            f" without one. Hand in loss={labels}; for example "
            f"loss=lambda outputs, batch: {example}."
        )
    on_missing_loss()
    return mean_of_outputs(outputs)


def described(value: object) -> str:
    """Say what was returned: a tensor and its shape, or another type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _scalars(outputs: object) -> tuple[str, ...]:
    """Return the outputs that a loss may be the sum of, as code."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(outputs, Mapping):
        pairs = outputs.items()
    elif isinstance(outputs, (tuple, list)):
        pairs = enumerate(outputs)
    return tuple(
        f"outputs[{key!r}]"
        for key, value in pairs
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad
    )


@functools.cache
def _warn_of_other_losses(scalars: tuple[str, ...]) -> None:
    """Warn, once, where a tuple that begins with the loss has more scalars."""
    loss, *others = scalars or ("",)
    if loss == "outputs[0]" and others:
        warnings.warn(
            f"The model returned several scalars, and only {loss} is taken as its "
            f"loss. If that does not contain {', '.join(others)}: "
            f"loss=lambda outputs, batch: {' + '.join(scalars)}.",
            stacklevel=6,
        )


def mean_of_outputs(outputs: object) -> torch.Tensor:
    """Return the mean of the means of all floating-point outputs."""
    means = [tensor.mean(dtype=torch.float32) for tensor in _float_tensors(outputs)]
    return torch.stack(means).mean()


def _float_tensors(outputs: object) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, which is not imported for it."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def uses_loss_function(model_class: type[nn.Module]) -> bool:
    """Whether the forward of a transformers model calls ``self.loss_function``."""
    code = getattr(inspect.unwrap(model_class.forward), "__code__", None)
    return "loss_function" in getattr(code, "co_names", ())


def evaluate_batch(
    model: nn.Module, batch: object, loss: Loss | None
) -> tuple[object, object]:
    """Run an evaluation forward; return the outputs, and the loss if there is one.

    Labels stay in the batch, as in ``Trainer.evaluate``: the loss takes memory, too.
    """
    outputs = call_model(model, batch, for_loss=loss is not None)
    return outputs, loss(outputs, batch) if loss is not None else None
