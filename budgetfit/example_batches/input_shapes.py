"""Candidate input shapes of a layer, the likeliest first."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

from torch import nn

from budgetfit.example_batches.request import BatchRequest

DEFAULT_LENGTH = 128  # tokens or time steps, where nothing in the model names a limit
_MAX_DEFAULT_LENGTH = 1024  # as for transformers models
_WAVE_SAMPLES = 16_000  # one second of speech for a convolution over one channel
_LENGTHS = (1024, DEFAULT_LENGTH, 512, 256, 100, 96, 64, 50, 32, 16)
# 224 is the ImageNet default. The others: ImageNet, CIFAR and MNIST, GANs, autoencoders
# and latents; 299 is Inception's, 227 AlexNet's.
_IMAGE_SIDES = (224, 256, 32, 28, 64, 128, 96, 299, 227, 384, 512, 48, 16, 8)
# Frames, height, width: C3D and torchvision's r3d_18, video transformers, volumes.
_VIDEOS = (
    *((16, 112, 112), (16, 224, 224), (8, 224, 224), (32, 224, 224), (16, 64, 64)),
    *((64, 64, 64), (32, 32, 32), (96, 96, 96), (128, 128, 128), (16, 16, 16)),
)
_IMAGE_ATTRIBUTES = ("img_size", "image_size", "input_size", "resolution")
_EXTRA_TOKENS = 6  # class and distillation tokens and registers in a position table

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SEQUENCE_MODULES = (
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.MultiheadAttention,
    nn.RNNBase,
)
Shape = tuple[int, ...]


def determines_input_shape(layer: nn.Module) -> bool:
    """Whether the layer constrains the shape of its input."""
    if isinstance(layer, nn.PReLU):
        return layer.num_parameters > 1
    return isinstance(layer, tuple(_SHAPES))


def candidate_input_shapes(request: BatchRequest, layer: nn.Module) -> Iterator[Shape]:
    """Yield input shapes of the layer, with the request's batch size."""
    shapes = next(make for kind, make in _SHAPES.items() if isinstance(layer, kind))
    for shape in dict.fromkeys(shapes(request, layer)):
        yield (request.batch_size, *shape)


def is_length_first(module: nn.Module) -> bool:
    """Whether the module takes ``[length, batch, features]``, not batch first."""
    if not isinstance(module, SEQUENCE_MODULES):
        return False
    for part in module.modules():
        if (batch_first := getattr(part, "batch_first", None)) is not None:
            return not batch_first
    return False


def _tokens(
    request: BatchRequest, layer: nn.Embedding | nn.EmbeddingBag
) -> Iterable[Shape]:
    positions = _position_rows(request.model, layer)
    likely = min(positions, _MAX_DEFAULT_LENGTH) if positions else DEFAULT_LENGTH
    # A Linear over the flattened embeddings of a sample fixes the number of tokens.
    flat = [
        part.in_features // layer.embedding_dim
        for part in request.model.modules()
        if isinstance(part, nn.Linear) and not part.in_features % layer.embedding_dim
    ]
    return [(length,) for length in _lengths(request, likely, *flat)]


def max_positions(model: nn.Module) -> int | None:
    """Return the size of a plain model's position embedding; None without one."""
    tokens = (part for part in model.modules() if isinstance(part, nn.Embedding))
    first = next(tokens, None)
    return None if first is None else _position_rows(model, first) or None


def _position_rows(model: nn.Module, tokens: nn.Module) -> int:
    """Return the rows of the smallest position embedding in the model; 0 if none."""
    tables = [
        (name, module.num_embeddings)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module is not tokens
    ]
    tables += [
        (name, parameter.shape[-2])
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not name.endswith("weight")
    ]
    is_positions = re.compile(r"pos|wpe")
    return min((rows for name, rows in tables if is_positions.search(name)), default=0)


def _features(request: BatchRequest, layer: nn.Linear) -> Iterable[Shape]:
    rows = [(request.max_length or DEFAULT_LENGTH, layer.in_features)]
    if any(isinstance(part, SEQUENCE_MODULES) for part in request.model.modules()):
        # Later layers would take a 2-d input as one unbatched sequence.
        return rows
    return [(layer.in_features,), *rows]


def _signal(request: BatchRequest, layer: nn.Conv1d) -> Iterable[Shape]:
    likely = _WAVE_SAMPLES if layer.in_channels == 1 else _MAX_DEFAULT_LENGTH
    return [(layer.in_channels, length) for length in _lengths(request, likely)]


def _lengths(request: BatchRequest, *likely: int) -> Iterator[int]:
    if request.max_length is not None:
        yield request.max_length
        return
    yield from filter(None, likely)
    yield from _LENGTHS


def _image(request: BatchRequest, layer: nn.Conv2d) -> Iterable[Shape]:
    if request.image_size is not None:
        request.used.add("image_size")
        return [(layer.in_channels, *request.image_size)]
    sides = dict.fromkeys(_declared_image_sizes(request.model, layer))
    sides |= dict.fromkeys([(_IMAGE_SIDES[0],) * 2])
    sides |= dict.fromkeys(_image_sizes_from_position_rows(request.model, layer))
    sides |= dict.fromkeys((side, side) for side in _IMAGE_SIDES)
    return [(layer.in_channels, *both) for both in sides]


def _declared_image_sizes(
    model: nn.Module, layer: nn.Conv2d
) -> Iterator[tuple[int, int]]:
    """Yield image sizes from attributes of modules that contain the layer (timm)."""
    for module in model.modules():
        if not any(part is layer for part in module.modules()):
            continue
        for name in _IMAGE_ATTRIBUTES:
            size = vars(module).get(name)
            sides = (size, size) if isinstance(size, int) else size
            if isinstance(sides, (tuple, list)) and len(sides) > 1:
                height, width = sides[-2:]
                if isinstance(height, int) and isinstance(width, int):
                    yield height, width


def _image_sizes_from_position_rows(
    model: nn.Module, layer: nn.Conv2d
) -> Iterator[tuple[int, int]]:
    """Yield square image sizes whose patch count matches a position embedding."""
    if layer.kernel_size != layer.stride:
        return
    rows = [
        parameter.shape[-2]
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and "pos" in name
    ]
    for count, extra in product(rows, range(_EXTRA_TOKENS)):
        side = math.isqrt(max(count - extra, 0))
        if side and side * side == count - extra:
            yield side * layer.stride[0], side * layer.stride[1]


def _generator_noise(_: BatchRequest, layer: Any) -> Iterable[Shape]:
    """Return noise shapes of a generator, which starts from one pixel (DCGAN)."""
    dimensions = len(layer.kernel_size)
    return [(layer.in_channels, *(side,) * dimensions) for side in (1, 4, 8, 16)]


def _channels(width: int) -> list[Shape]:
    """Return shapes with so many channels and zero to three further dimensions."""
    image, video = (_IMAGE_SIDES[0],) * 2, _VIDEOS[0]
    return [(width,), (width, DEFAULT_LENGTH), (width, *image), (width, *video)]


def _batch_norm_input(_: BatchRequest, layer: Any) -> Iterable[Shape]:
    shapes = _channels(layer.num_features)
    dimensions = next(digit for digit in type(layer).__name__ if digit in "123S")
    return {"1": shapes[:2], "2": shapes[2:3], "3": shapes[3:]}.get(dimensions, shapes)


def _layer_norm_input(_: BatchRequest, layer: Any) -> Iterable[Shape]:
    shape = tuple(layer.normalized_shape)
    return [shape, (DEFAULT_LENGTH, *shape)]


def _in_sequence(request: BatchRequest, layer: Any) -> Iterable[Shape]:
    length = request.max_length or DEFAULT_LENGTH
    if isinstance(layer, nn.RNNBase):
        return [(length, layer.input_size)]
    return [(length, first_attention(layer).embed_dim)]


def first_attention(module: nn.Module) -> nn.MultiheadAttention:
    """Return the first attention layer of one of torch's Transformer modules."""
    return next(
        part for part in module.modules() if isinstance(part, nn.MultiheadAttention)
    )


_SHAPES: dict[type[nn.Module], Callable[[BatchRequest, Any], Iterable[Shape]]] = {
    nn.Linear: _features,
    nn.Embedding: _tokens,
    nn.EmbeddingBag: _tokens,
    nn.ConvTranspose1d: _generator_noise,
    nn.ConvTranspose2d: _generator_noise,
    nn.ConvTranspose3d: _generator_noise,
    nn.Conv1d: _signal,
    nn.Conv2d: _image,
    nn.Conv3d: lambda _, layer: [(layer.in_channels, *shape) for shape in _VIDEOS],
    nn.LayerNorm: _layer_norm_input,
    nn.RMSNorm: _layer_norm_input,
    nn.GroupNorm: lambda _, layer: _channels(layer.num_channels),
    nn.modules.batchnorm._NormBase: _batch_norm_input,  # noqa: SLF001 - no public name
    nn.PReLU: lambda _, layer: _channels(layer.num_parameters),
    nn.RNNCellBase: lambda _, layer: [(layer.input_size,)],
    **dict.fromkeys(SEQUENCE_MODULES, _in_sequence),
}
