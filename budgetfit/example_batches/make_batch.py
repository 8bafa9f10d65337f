"""Make an example batch for a model from its config, attributes or first layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from budgetfit.applying.loss.call_model import is_transformers_model, unwrap_model
from budgetfit.applying.loss.prediction_loss import TARGET, prediction_loss
from budgetfit.batches.batch_tree import (
    Batch,
    batch_size_of,
    describe_batch,
    map_batch,
    resize_batch,
)
from budgetfit.core.samples.sample_dims import FIRST_DIM, SampleDims
from budgetfit.core.validation import parse_image_size
from budgetfit.errors import InputError
from budgetfit.example_batches import input_shapes, token_ids
from budgetfit.example_batches.diffusion import is_diffusers_model, make_diffusion_batch
from budgetfit.example_batches.plain_modules import (
    make_plain_module_batch,
    no_example_batch,
)
from budgetfit.example_batches.request import BatchRequest
from budgetfit.example_batches.transformers_inputs import make_transformers_batch


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """An example batch and the assumptions made for it.

    Attributes:
        batch: Small real CPU tensors: a mapping is passed as keyword arguments, a tuple
            as positional ones, a tensor as the only one.
        loss: ``loss(outputs, batch)`` of a batch with a target; None for the model's.
    """

    batch: Batch
    notes: tuple[str, ...]
    loss: Callable[..., Any] | None = None


def make_batch(  # noqa: PLR0913 - one value each
    model: nn.Module,
    *,
    batch_size: int = 2,
    max_length: int | None = None,
    image_size: object = None,
    frames: int | None = None,
    text_only: bool = False,
    padded: bool = False,
    dims: SampleDims = FIRST_DIM,
) -> ExampleBatch:
    """Make a batch of valid random values that the model can be trained on.

    Only configs and parameter shapes are read, so the model may be on meta. Neither the
    model nor the global RNG state is changed.

    Args:
        model: A transformers, timm or Lightning model, or any module whose first layer
            with parameters determines the input shape.
        batch_size: Samples in the batch.
        max_length: Sequence length of a text batch; by default the model's positions,
            at most 1024.
        image_size: Image size in pixels, for ``parse_image_size``; by default the
            configured one.
        frames: Frames of a video; by default the configured or usual number.
        text_only: Leave out images and audio, for multimodal models.
        padded: All text samples but the first end in padding, which an attention mask
            tells, as a data collator pads samples of several lengths.
        dims: The sample dimension of the model's own example inputs.

    Raises:
        InputError: The inputs of the model are unknown, a size is invalid, or an option
            does not apply to the model.

    >>> make_batch(nn.Linear(16, 4)).batch.shape
    torch.Size([2, 16])
    """
    if batch_size < 1:
        raise InputError(f"A batch needs at least 1 sample, not {batch_size}.")
    if max_length is not None and max_length < 1:
        raise InputError(f"max_length must be at least 1, not {max_length}.")
    if frames is not None and frames < 1:
        raise InputError(f"frames must be at least 1, not {frames}.")
    request = BatchRequest(
        unwrap_model(model),
        batch_size,
        max_length,
        None if image_size is None else parse_image_size(image_size),
        frames,
        text_only,
        padded,
        dims,
    )
    batch = _make(request)
    _check_options_used(request, batch)
    return ExampleBatch(
        batch=batch,
        notes=tuple(dict.fromkeys(request.notes)),
        loss=loss_for(request.model, batch),
    )


def loss_for(model: nn.Module, batch: Batch) -> Callable[..., object] | None:
    """Return the usual loss for a batch with a target; None for the model's own."""
    has_target = isinstance(batch, Mapping) and TARGET in batch
    if has_target and is_diffusers_model(unwrap_model(model)):
        return prediction_loss
    return None


def max_positions(model: nn.Module) -> int | None:
    """Return the largest sequence length of a text batch; None if unlimited."""
    model = unwrap_model(model)
    if _is_transformers_model(model):
        return token_ids.max_positions(model)
    return input_shapes.max_positions(model)


def _check_options_used(request: BatchRequest, batch: Batch) -> None:
    """Refuse options that had no effect on the batch."""
    name = type(request.model).__name__
    if request.image_size is not None and "image_size" not in request.used:
        raise InputError(
            f"image_size= changes nothing in a batch made for {name}: it holds no "
            "images whose size can be chosen. Leave it out, or pass batch=."
        )
    if request.requested_length is not None and "max_length" not in request.used:
        raise InputError(
            f"max_length= (or lengths=) changes nothing in a batch made for {name}: "
            "it holds no sequence whose length can be chosen. Leave it out, or pass "
            "batch=."
        )
    if request.frames is not None and "frames" not in request.used:
        raise InputError(
            f"frames= changes nothing in a batch made for {name}: it holds no videos "
            "whose length can be chosen. Leave it out, or pass batch=."
        )
    if not request.text_only:
        return
    tensors = describe_batch(batch).items()
    others = [path for path, (_, dtype) in tensors if "float" in dtype]
    if others:
        raise InputError(
            f"text_only= is for models that also read text alone: {name} needs "
            f"{', '.join(others)}. Leave it out, or pass batch=."
        )


def _make(request: BatchRequest) -> Batch:
    model = request.model
    if (make := getattr(model, "make_example_batch", None)) is not None:
        return make(request)  # integrations/model_sources/keras_model.py
    if _is_transformers_model(model):
        return make_transformers_batch(request)
    if is_diffusers_model(model):
        return make_diffusion_batch(request)
    declared = _declared_batch(request)
    return make_plain_module_batch(request) if declared is None else declared


def _is_transformers_model(model: nn.Module) -> bool:
    return is_transformers_model(model) and hasattr(model, "main_input_name")


def _declared_batch(request: BatchRequest) -> Batch | None:
    """Return a batch from the model's ``example_input_array`` or similar, else None."""
    model = request.model
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return _resized(request, example, "example_input_array")
    if (shape := _timm_shape(model)) is not None:
        shape = (shape[0], *request.image_size_or(shape[1:]))
        source = "as asked for" if request.image_size else "from pretrained_cfg"
        request.notes.append(f"images of {list(shape)}, {source}")
        return request.floats((request.batch_size, *shape))
    dummies = getattr(model, "dummy_inputs", None)
    if dummies is not None:
        return _resized(request, dummies, "dummy_inputs")
    return None


def _resized(request: BatchRequest, example: Batch, source: str) -> Batch:
    """Resize the model's own example to the requested batch size."""
    request.notes.append(f"batch from the model's own {source}")
    try:
        size = batch_size_of(example, dims=request.dims)
    except InputError as error:
        if request.dims.named:
            raise
        raise no_example_batch(
            request.model, f"its {source} holds no tensor"
        ) from error
    if size != request.batch_size:
        example = resize_batch(example, request.batch_size, dims=request.dims)
    return copy_to_cpu(example)


def copy_to_cpu(example: Batch) -> Batch:
    """Copy an example to real CPU tensors."""
    # Meta tensors are replaced: integers by zeros, floats by normal random values.
    generator = torch.Generator("cpu").manual_seed(0)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.detach().to("cpu", copy=True)
        if tensor.is_floating_point():
            made = torch.randn(tensor.shape, generator=generator, device="cpu")
            return made.to(tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    return map_batch(example, moved)


def _timm_shape(model: nn.Module) -> tuple[int, int, int] | None:
    """Return ``input_size`` of timm's ``pretrained_cfg``: channels, height, width."""
    settings = getattr(model, "pretrained_cfg", None)
    if settings is None:
        settings = getattr(model, "default_cfg", None)
    if isinstance(settings, dict):
        shape = settings.get("input_size")
    else:
        shape = getattr(settings, "input_size", None)
    return tuple(shape) if shape and len(shape) == 3 else None  # noqa: PLR2004
