"""Batches for plain modules: the first layer with parameters fixes the shape."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from budgetfit.core.errors import InputError
from budgetfit.tracing.batch_shapes import Batch
from budgetfit.tracing.made_batch_request import BatchRequest, forward_arguments

_DEFAULT_LENGTH = 128  # tokens or time steps, where nothing in the model names a limit
_LONGEST_DEFAULT = 1024  # as for transformers models
_WAVE_SAMPLES = 16_000  # one second of speech for a convolution over one channel
_IMAGE_PIXELS = 224  # interface.md section 6
_VIDEO_SHAPE = (16, 112, 112)  # frames, height, width of C3D and torchvision's r3d_18

_READS_TWO = (nn.Transformer, nn.TransformerDecoder, nn.TransformerDecoderLayer)
_SEQUENCE_MODULES = (
    *_READS_TWO,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.MultiheadAttention,
    nn.RNNBase,
)


def batch_dimension(model: nn.Module) -> int:
    """Return the dimension of the model's inputs that counts samples: 0 nearly always.

    It is 1 for torch's own recurrent, attention and Transformer modules that were made
    without ``batch_first=True``: their inputs are ``[length, batch, features]``.
    """
    return 1 if _is_length_first(model) else 0


def make_layer_batch(request: BatchRequest) -> Batch:
    """Return what the model's first parameterised layer reads.

    A tensor, or a tuple of them for torch's own modules of several inputs, or a mapping
    for a language model that takes targets beside its tokens.

    Raises:
        InputError: The model needs several inputs, or its first layer fixes no shape.
    """
    model = request.model
    if isinstance(model, _SEQUENCE_MODULES):
        return _sequence_module_input(request, model)
    takes, needs = forward_arguments(model)
    if len(needs) > 1:
        raise cannot_make(model, f"its forward needs {', '.join(needs)}", needs)
    name, layer, make = _first_layer(model, needs)
    made = make(request, layer)
    where = f"{name} ({type(layer).__name__})" if name else type(layer).__name__
    request.notes.append(f"input {list(made.shape)}, from the first layer, {where}")
    if isinstance(layer, nn.Embedding) and _writes_tokens(model, layer):
        for target in {"targets", "labels"} & takes:
            first = next(iter(needs), "input_ids")
            return {first: made, target: made.clone()}
    return made


def cannot_make(
    model: nn.Module, reason: str, needs: tuple[str, ...] = ()
) -> InputError:
    """Return the error that shows how to hand in a batch for this model."""
    names = needs or ("x",)
    items = ", ".join(f'"{name}": ...' for name in names)
    example = f"batch={{{items}}}" if len(names) > 1 else "batch=torch.zeros(2, 3, 64)"
    return InputError(
        f"No batch can be made for {type(model).__name__}: {reason}. Pass a small one "
        f"that your data loader could give: {example} with tensors of your model's "
        "shapes and dtypes, the batch dimension first."
    )


def _first_layer(
    model: nn.Module, needs: tuple[str, ...]
) -> tuple[str, nn.Module, Callable[[BatchRequest, Any], Tensor]]:
    """Find the first layer with parameters, in the order of registration.

    It may differ from the order of calls; a wrong guess shows itself in the first
    forward pass.
    """
    for name, layer in _layers_with_parameters(model):
        where = f"its first layer, {name or 'itself'} ({type(layer).__name__}),"
        if any(is_lazy(parameter) for parameter in layer.parameters()):
            raise cannot_make(model, f"{where} is lazy: it has no shape yet", needs)
        for kind, make in _MAKERS.items():
            if not isinstance(layer, kind):
                continue
            length_first = _length_first_part(model)
            if length_first and not isinstance(layer, _CONVOLUTIONS):
                reason = (
                    f"{length_first} was made without batch_first=True, so it does "
                    "not show which dimension of the input is the batch"
                )
                raise cannot_make(model, reason, needs)
            return name, layer, make
        raise cannot_make(model, f"{where} fixes no input shape", needs)
    raise cannot_make(model, "no layer of it has parameters", needs)


def _layers_with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        has_own = any(True for _ in module.parameters(recurse=False))
        # Parameters beside children are position tables and class tokens: no layer.
        is_layer = has_own and not any(True for _ in module.children())
        if is_layer or isinstance(module, _SEQUENCE_MODULES):
            yield name, module


def _is_length_first(module: nn.Module) -> bool:
    """Whether this module itself reads ``[length, batch, features]``."""
    if not isinstance(module, _SEQUENCE_MODULES):
        return False
    for part in module.modules():
        if (batch_first := getattr(part, "batch_first", None)) is not None:
            return not batch_first
    return False


def _length_first_part(model: nn.Module) -> str:
    """Return name and type of the first part that is length-first; else nothing."""
    for name, module in model.named_modules():
        if _is_length_first(module):
            return f"{name} ({type(module).__name__})"
    return ""


def _sequence_module_input(
    request: BatchRequest, model: nn.Module
) -> Tensor | tuple[Tensor, ...]:
    """Return what torch's own sequence modules read, in their order of dimensions."""
    length = request.max_length or _DEFAULT_LENGTH
    rows = (request.batch_size, length)
    shape = rows[::-1] if _is_length_first(model) else rows
    order = "[length, batch, features]" if _is_length_first(model) else "batch first"
    request.notes.append(f"{length} positions, {order}; max_length= changes the length")
    if isinstance(model, nn.RNNBase):
        return request.floats((*shape, model.input_size))
    attention = next(
        part for part in model.modules() if isinstance(part, nn.MultiheadAttention)
    )
    if attention is model:
        widths = (attention.embed_dim, attention.kdim, attention.vdim)
        return tuple(request.floats((*shape, width)) for width in widths)
    source = request.floats((*shape, attention.embed_dim))
    if isinstance(model, _READS_TWO):
        return source, request.floats((*shape, attention.embed_dim))
    return source


def _tokens(request: BatchRequest, layer: nn.Embedding | nn.EmbeddingBag) -> Tensor:
    length = request.max_length
    if length is None:
        positions = _positions(request.model, layer)
        length = min(positions, _LONGEST_DEFAULT) if positions else _DEFAULT_LENGTH
    return request.integers((request.batch_size, length), 0, layer.num_embeddings)


def _positions(model: nn.Module, tokens: nn.Module) -> int | None:
    """Return the rows of the smallest table of positions in the model."""
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


def _writes_tokens(model: nn.Module, tokens: nn.Embedding) -> bool:
    """Whether a layer answers with one score for each token of the vocabulary."""
    return any(
        isinstance(layer, nn.Linear) and layer.out_features == tokens.num_embeddings
        for layer in model.modules()
    )


def _features(request: BatchRequest, layer: nn.Linear) -> Tensor:
    rows: tuple[int, ...] = (request.batch_size,)
    if any(isinstance(part, _SEQUENCE_MODULES) for part in request.model.modules()):
        # Two dimensions would be one unbatched sequence to the parts behind it.
        rows = (*rows, request.max_length or _DEFAULT_LENGTH)
    return request.floats((*rows, layer.in_features))


def _signal(request: BatchRequest, layer: nn.Conv1d) -> Tensor:
    samples = _WAVE_SAMPLES if layer.in_channels == 1 else _LONGEST_DEFAULT
    length = request.max_length or samples
    return request.floats((request.batch_size, layer.in_channels, length))


def _image(request: BatchRequest, layer: nn.Conv2d) -> Tensor:
    pixels = (_IMAGE_PIXELS, _IMAGE_PIXELS)
    return request.floats((request.batch_size, layer.in_channels, *pixels))


def _video(request: BatchRequest, layer: nn.Conv3d) -> Tensor:
    return request.floats((request.batch_size, layer.in_channels, *_VIDEO_SHAPE))


def _normalised(request: BatchRequest, layer: nn.LayerNorm) -> Tensor:
    return request.floats((request.batch_size, *layer.normalized_shape))


def _sequence_layer(request: BatchRequest, layer: nn.Module) -> Tensor:
    made = _sequence_module_input(request, layer)
    return made[0] if isinstance(made, tuple) else made


def _step(request: BatchRequest, layer: nn.RNNCellBase) -> Tensor:
    return request.floats((request.batch_size, layer.input_size))


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MAKERS: dict[type[nn.Module], Callable[[BatchRequest, Any], Tensor]] = {
    nn.Linear: _features,
    nn.Embedding: _tokens,
    nn.EmbeddingBag: _tokens,
    nn.Conv1d: _signal,
    nn.Conv2d: _image,
    nn.Conv3d: _video,
    nn.LayerNorm: _normalised,
    nn.RNNCellBase: _step,
    **dict.fromkeys(_SEQUENCE_MODULES, _sequence_layer),
}
