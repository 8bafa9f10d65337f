"""Generate an example batch for a Keras model from its inputs, outputs and loss."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from budgetfit.errors import InputError
from budgetfit.example_batches.request import BatchRequest


def example_batch(model: Any, loss: Any, request: BatchRequest) -> dict[str, Any]:
    """Return inputs, with targets where there is a compiled loss, by their names.

    Integer inputs are zeros, a valid id in every vocabulary.

    Raises:
        InputError: The shape of the model's inputs or targets is unknown.
    """
    keras: Any = import_module("keras")  # keras is imported already

    graph = getattr(model, "_functional", None) or model
    declared = getattr(graph, "_inputs_struct", None)
    if declared is None:
        raise _unknown(model, "it is no graph of keras.Input")
    inputs = keras.tree.map_structure(lambda item: _input(item, request), declared)
    request.notes.append("input from the Keras model's input_shape")
    if loss is None:
        return {"inputs": inputs}
    outputs = graph._outputs_struct
    if keras.tree.is_nested(loss) or isinstance(outputs, dict):
        raise _unknown(model, "it has several losses or named outputs")
    targets = keras.tree.map_structure(
        lambda item: _target(item, loss, request, model), outputs
    )
    request.notes.append(f"loss {_name(loss)!r} of the Keras model's compile()")
    return {"inputs": inputs, "targets": targets}


def _input(declared: Any, request: BatchRequest) -> torch.Tensor:
    sizes = _sizes(declared.shape, request)
    if "int" in str(declared.dtype) or str(declared.dtype) == "bool":
        dtype = getattr(torch, str(declared.dtype))
        return torch.zeros(sizes, dtype=dtype, device="cpu")
    return request.floats(sizes)


def _target(output: Any, loss: Any, request: BatchRequest, model: Any) -> torch.Tensor:
    """Return class ids for a sparse loss, else a distribution shaped as the output."""
    if len(output.shape) < 1:
        raise _unknown(model, "its output is a scalar")
    sizes = _sizes(output.shape, request)
    if "sparse" in _name(loss).lower():
        return request.integers(sizes[:-1], 0, sizes[-1])
    return torch.softmax(request.floats(sizes), dim=-1)


def _sizes(shape: Sequence[int | None], request: BatchRequest) -> tuple[int, ...]:
    """Fill in the batch size, and the requested length where the shape is dynamic."""
    rest = [request.max_length if size is None else size for size in shape[1:]]
    if any(size is None for size in rest):
        raise InputError(
            f"The Keras model leaves a size of its input open: {tuple(shape)}. Say it "
            "with max_length=, or pass batch=."
        )
    return (request.batch_size, *(int(size) for size in rest if size is not None))


def _name(loss: Any) -> str:
    if isinstance(loss, str):
        return loss
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", "loss"))


def _unknown(model: Any, reason: str) -> InputError:
    return InputError(
        f"No batch can be made for the Keras model {model.name!r}: {reason}. Pass one: "
        "batch=(inputs, targets), with tensors as your data loader gives them."
    )
