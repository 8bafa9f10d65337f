"""Example batches for plain modules, from their first layer with parameters."""

from collections.abc import Iterator
from itertools import zip_longest

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from budgetfit.applying.loss.call_model import unwrap_model
from budgetfit.batches.batch_tree import Batch
from budgetfit.errors import InputError
from budgetfit.example_batches.dry_run import forward_accepts
from budgetfit.example_batches.input_shapes import (
    CONVOLUTIONS,
    DEFAULT_LENGTH,
    SEQUENCE_MODULES,
    candidate_input_shapes,
    determines_input_shape,
    first_attention,
    is_length_first,
)
from budgetfit.example_batches.request import BatchRequest, forward_arguments

# The first layer to run is nearly always among the first ones.
_MAX_LAYERS, _MAX_SHAPES = 64, 64
_TAKES_SOURCE_AND_TARGET = (
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)


def batch_dimension(model: nn.Module) -> int:
    """Return the batch dimension of the model's inputs, usually 0.

    It is 1 for torch's recurrent, attention and Transformer modules with
    ``batch_first=False``: their inputs are ``[length, batch, features]``.
    """
    return 1 if is_length_first(unwrap_model(model)) else 0


def make_plain_module_batch(request: BatchRequest) -> Batch:
    """Return an input for the model's first layer with parameters.

    A tensor, a tuple for torch's modules with several inputs, or a mapping for a
    language model that takes targets, too.

    Raises:
        InputError: The model needs several inputs, or its first layer determines no
            shape.
    """
    model = request.model
    if isinstance(model, SEQUENCE_MODULES):
        return _sequence_module_input(request, model)
    if isinstance(model, nn.Bilinear):
        rows = request.batch_size
        widths = (model.in1_features, model.in2_features)
        return tuple(request.floats((rows, width)) for width in widths)
    takes, needs = forward_arguments(model)
    if len(needs) > 1:
        raise no_example_batch(model, f"its forward needs {', '.join(needs)}", needs)
    first: tuple[Batch, str] | None = None
    for name, layer, shape in _candidates(request, needs):
        where = f"{name} ({type(layer).__name__})" if name else type(layer).__name__
        batch = _random_batch(request, layer, shape, takes, needs)
        note = f"input {list(shape)}, from the first layer, {where}"
        first = first or (batch, note)
        if forward_accepts(model, batch):
            request.notes.append(note)
            return batch
    assert first is not None  # noqa: S101 - each layer has a shape
    request.notes.append(first[1])
    return first[0]  # the trace will report the mismatch


def no_example_batch(
    model: nn.Module, reason: str, needs: tuple[str, ...] = ()
) -> InputError:
    """Return the error that shows how to pass a batch for this model."""
    names = needs or ("x",)
    items = ", ".join(f'"{name}": ...' for name in names)
    example = f"batch={{{items}}}" if len(names) > 1 else "batch=torch.zeros(2, 3, 64)"
    return InputError(
        f"No batch can be made for {type(model).__name__}: {reason}. Pass a small one "
        f"that your data loader could give: {example} with tensors of your model's "
        "shapes and dtypes, the batch dimension first."
    )


def _candidates(
    request: BatchRequest, needs: tuple[str, ...]
) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """Yield layers and shapes: the likeliest shape of each layer, then the next."""
    layers = list(_readable_layers(request.model, needs))
    shapes = [list(candidate_input_shapes(request, layer)) for _, layer in layers]
    seen = set()
    for row in zip_longest(*shapes):
        for (name, layer), shape in zip(layers, row, strict=True):
            kind = shape, isinstance(layer, nn.Embedding | nn.EmbeddingBag)
            if shape is not None and kind not in seen:
                seen.add(kind)
                yield name, layer, shape
                if len(seen) == _MAX_SHAPES:
                    return


def _readable_layers(
    model: nn.Module, needs: tuple[str, ...]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield layers that may run first and determine the input shape."""
    # In the order of registration, which may differ from the order of calls.
    length_first = _length_first_part(model)
    reason = "no layer of it has parameters"
    found = 0
    for name, layer in _layers_with_parameters(model):
        where = f"its first layer, {name or 'itself'} ({type(layer).__name__}),"
        if not determines_input_shape(layer):
            reason = f"{where} fixes no input shape" if not found else reason
            continue
        if length_first and not isinstance(layer, CONVOLUTIONS):
            reason = (
                f"{length_first} was made without batch_first=True, so it does "
                "not show which dimension of the input is the batch"
            )
            break
        yield name, layer
        found += 1
        if found == _MAX_LAYERS:
            return
    if not found:
        raise no_example_batch(model, reason, needs)


def _random_batch(
    request: BatchRequest,
    layer: nn.Module,
    shape: tuple[int, ...],
    takes: frozenset[str],
    needs: tuple[str, ...],
) -> Batch:
    """Return random values of a shape, and targets for language models."""
    if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return request.floats(shape)
    made = request.integers(shape, 0, layer.num_embeddings)
    if isinstance(layer, nn.Embedding) and _predicts_tokens(request.model, layer):
        for target in sorted({"targets", "labels"} & takes):  # the same in each process
            return {next(iter(needs), "input_ids"): made, target: made.clone()}
    return made


def _layers_with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        has_own = any(True for _ in module.parameters(recurse=False))
        # Own parameters of containers are position embeddings and class tokens.
        is_layer = has_own and not any(True for _ in module.children())
        # Parametrizations (weight norm) are child modules.
        is_layer = is_layer or is_parametrized(module)
        if is_layer or isinstance(module, SEQUENCE_MODULES):
            yield name, module


def _length_first_part(model: nn.Module) -> str:
    """Return name and type of the first module with ``batch_first=False``, or ""."""
    for name, module in model.named_modules():
        if is_length_first(module):
            return f"{name} ({type(module).__name__})"
    return ""


def _sequence_module_input(
    request: BatchRequest, model: nn.Module
) -> Tensor | tuple[Tensor, ...]:
    """Return inputs of torch's sequence modules, in their order of dimensions."""
    length = request.max_length or DEFAULT_LENGTH
    rows = (request.batch_size, length)
    shape = rows[::-1] if is_length_first(model) else rows
    order = "[length, batch, features]" if is_length_first(model) else "batch first"
    request.notes.append(f"{length} positions, {order}; max_length= changes the length")
    if isinstance(model, nn.RNNBase):
        return request.floats((*shape, model.input_size))
    attention = first_attention(model)
    if attention is model:
        widths = (attention.embed_dim, attention.kdim, attention.vdim)
        return tuple(request.floats((*shape, width)) for width in widths)
    source = request.floats((*shape, attention.embed_dim))
    if isinstance(model, _TAKES_SOURCE_AND_TARGET):
        return source, request.floats((*shape, attention.embed_dim))
    return source


def _predicts_tokens(model: nn.Module, tokens: nn.Embedding) -> bool:
    """Whether a layer has one output per token of the vocabulary."""
    return any(
        isinstance(layer, nn.Linear) and layer.out_features == tokens.num_embeddings
        for layer in model.modules()
    )
