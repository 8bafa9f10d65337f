"""An example batch for a model that came without one."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from budgetfit.batches.batch_tree import (
    Batch,
    batch_size_of,
    change_tensors,
    describe_batch,
    resize_batch,
)
from budgetfit.core.sample_dims import FIRST, SampleDims
from budgetfit.core.validation import parse_image_size
from budgetfit.errors import InputError
from budgetfit.example_batches import input_shapes, token_ids
from budgetfit.example_batches.plain_modules import (
    batch_dimension,
    cannot_make,
    make_layer_batch,
)
from budgetfit.example_batches.request import BatchRequest, unwrap_model
from budgetfit.example_batches.transformers_inputs import make_transformers_batch

__all__ = [
    "MadeBatch",
    "batch_dimension",
    "make_batch",
    "most_positions",
    "on_cpu",
]


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """An example batch and what was assumed for it.

    Attributes:
        batch: Small real CPU tensors: a mapping goes to the model as keyword arguments,
            a tuple as positional ones, a tensor as the only one.
        notes: The assumptions, in plain words.
        returns_loss: Whether the model answers this batch with ``outputs.loss``.
    """

    batch: Batch
    notes: tuple[str, ...]
    returns_loss: bool


def make_batch(  # noqa: PLR0913 - one value each
    model: nn.Module,
    *,
    batch_size: int = 2,
    max_length: int | None = None,
    image_size: object = None,
    text_only: bool = False,
    dims: SampleDims = FIRST,
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
        image_size: Pixels of made images, as ``parse_image_size`` reads them; left out,
            what the model was configured for.
        text_only: Leave out images and sound, for models that read text as well.
        dims: The dimension of an example of the model's own that counts samples.

    Raises:
        InputError: Nothing in the model says what it reads, a size is impossible, or a
            wish means nothing to the model.

    >>> make_batch(nn.Linear(16, 4)).batch.shape
    torch.Size([2, 16])
    """
    if batch_size < 1:
        raise InputError(f"A batch needs at least 1 sample, not {batch_size}.")
    if max_length is not None and max_length < 1:
        raise InputError(f"max_length must be at least 1, not {max_length}.")
    request = BatchRequest(
        unwrap_model(model),
        batch_size,
        max_length,
        None if image_size is None else parse_image_size(image_size),
        text_only,
        dims,
    )
    batch, returns_loss = _make(request)
    _check_wishes(request, batch)
    return MadeBatch(
        batch=batch,
        notes=tuple(dict.fromkeys(request.notes)),
        returns_loss=returns_loss,
    )


def most_positions(model: nn.Module) -> int | None:
    """Return the tokens that one row of a made text batch can have; None: no limit."""
    model = unwrap_model(model)
    if _is_transformers_model(model):
        return token_ids.most_positions(model)
    return input_shapes.most_positions(model)


def _check_wishes(request: BatchRequest, batch: Batch) -> None:
    """Refuse wishes that changed nothing: the batch is not what was meant."""
    name = type(request.model).__name__
    if request.image_size is not None and "image_size" not in request.used:
        raise InputError(
            f"image_size= changes nothing in a batch made for {name}: it holds no "
            "images whose size can be chosen. Leave it out, or pass batch=."
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


def _make(request: BatchRequest) -> tuple[Batch, bool]:
    model = request.model
    if (make := getattr(model, "make_example_batch", None)) is not None:
        batch, returns_loss = make(request)  # integrations/model_sources/keras_model.py
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
        shape = (shape[0], *request.sides_of_images(shape[1:]))
        source = "as asked for" if request.image_size else "from pretrained_cfg"
        request.notes.append(f"images of {list(shape)}, {source}")
        return request.floats((request.batch_size, *shape))
    dummies = getattr(model, "dummy_inputs", None)
    if dummies is not None:
        return _resized(request, dummies, "dummy_inputs")
    return None


def _resized(request: BatchRequest, example: Batch, source: str) -> Batch:
    """Give a declared example the wished number of samples."""
    request.notes.append(f"batch from the model's own {source}")
    try:
        size = batch_size_of(example, dims=request.dims)
    except InputError as error:
        if request.dims.named:
            raise
        raise cannot_make(request.model, f"its {source} holds no tensor") from error
    if size != request.batch_size:
        example = resize_batch(example, request.batch_size, dims=request.dims)
    return on_cpu(example)


def on_cpu(example: Batch) -> Batch:
    """Copy an example to real CPU tensors; one on meta has no values to copy.

    Whole numbers are then zeros, others those of a normal distribution.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.detach().to("cpu", copy=True)
        if tensor.is_floating_point():
            made = torch.randn(tensor.shape, generator=generator, device="cpu")
            return made.to(tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    return change_tensors(example, moved)


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
