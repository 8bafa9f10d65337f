"""An example batch for a model that came without one."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from budgetfit.core.errors import InputError
from budgetfit.tracing.batch_shapes import (
    Batch,
    batch_size_of,
    change_tensors,
    resize_batch,
)
from budgetfit.tracing.made_batch_layers import (
    batch_dimension,
    cannot_make,
    make_layer_batch,
)
from budgetfit.tracing.made_batch_request import BatchRequest, unwrap_model
from budgetfit.tracing.made_batch_transformers import make_transformers_batch

__all__ = ["MadeBatch", "batch_dimension", "make_batch"]


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """An example batch and what was assumed for it.

    Attributes:
        batch: Small real CPU tensors: a mapping goes to the model as keyword arguments,
            a tuple as positional ones, a tensor as the only one.
        notes: The assumptions, in plain words.
        returns_loss: Whether the model answers this batch with ``outputs.loss``.
        batch_dim: The dimension that counts samples.
    """

    batch: Batch
    notes: tuple[str, ...]
    returns_loss: bool
    batch_dim: int = 0


def make_batch(
    model: nn.Module, *, batch_size: int = 2, max_length: int | None = None
) -> MadeBatch:
    """Make a batch of valid values that the model can be trained on.

    Only configs and shapes of parameters are read: a model on meta is as good as a real
    one. Neither the model nor the global random state is changed.

    Args:
        model: A transformers, timm or Lightning model, or any module whose first layer
            with parameters fixes the shape of its input.
        batch_size: Samples in the batch.
        max_length: Sequence length of a text batch; left out, the model's positions, at
            most 1024.

    Raises:
        InputError: Nothing in the model says what it reads, or a size is impossible.

    >>> make_batch(nn.Linear(16, 4)).batch.shape
    torch.Size([2, 16])
    """
    if batch_size < 1:
        raise InputError(f"A batch needs at least 1 sample, not {batch_size}.")
    if max_length is not None and max_length < 1:
        raise InputError(f"max_length must be at least 1, not {max_length}.")
    request = BatchRequest(unwrap_model(model), batch_size, max_length)
    batch, returns_loss = _make(request)
    return MadeBatch(
        batch=batch,
        notes=tuple(dict.fromkeys(request.notes)),
        returns_loss=returns_loss,
        batch_dim=batch_dimension(request.model),
    )


def _make(request: BatchRequest) -> tuple[Batch, bool]:
    model = request.model
    if (make := getattr(model, "make_example_batch", None)) is not None:
        batch, returns_loss = make(request)  # integrations/keras.py
        return batch, returns_loss
    if _is_transformers_model(model):
        return make_transformers_batch(request)
    declared = _declared_batch(request)
    if declared is not None:
        return declared, False
    return make_layer_batch(request), False


def _is_transformers_model(model: nn.Module) -> bool:
    # By name: asking isinstance would import transformers for every plain module.
    return any(
        parent.__name__ == "PreTrainedModel" for parent in type(model).__mro__
    ) and hasattr(model, "main_input_name")


def _declared_batch(request: BatchRequest) -> Batch | None:
    """Return the batch that the model's own attributes describe, else None."""
    model = request.model
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return _resized(request, example, "example_input_array")
    if (shape := _timm_shape(model)) is not None:
        request.notes.append(f"images of {list(shape)}, from pretrained_cfg")
        return request.floats((request.batch_size, *shape))
    dummies = getattr(model, "dummy_inputs", None)
    if dummies is not None:
        return _resized(request, dummies, "dummy_inputs")
    return None


def _resized(request: BatchRequest, example: Batch, source: str) -> Batch:
    """Give a declared example the wished number of samples."""
    request.notes.append(f"batch from the model's own {source}")
    try:
        size = batch_size_of(example)
    except InputError as error:
        raise cannot_make(request.model, f"its {source} holds no tensor") from error
    if size != request.batch_size:
        example = resize_batch(example, request.batch_size)
    return _on_cpu(example, request)


def _on_cpu(example: Batch, request: BatchRequest) -> Batch:
    """Copy an example to real CPU tensors; one on meta has no values to copy."""

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.detach().to("cpu", copy=True)
        if tensor.is_floating_point():
            return request.floats(tensor.shape).to(tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    return change_tensors(example, moved)


def _timm_shape(model: nn.Module) -> tuple[int, ...] | None:
    """Return ``input_size`` of timm's ``pretrained_cfg``: channels, height, width."""
    settings = getattr(model, "pretrained_cfg", None)
    if settings is None:
        settings = getattr(model, "default_cfg", None)
    if isinstance(settings, dict):
        shape = settings.get("input_size")
    else:
        shape = getattr(settings, "input_size", None)
    return tuple(shape) if shape else None
