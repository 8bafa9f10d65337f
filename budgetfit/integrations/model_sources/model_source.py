"""Resolve a model argument: a module, config, path, hub id or factory."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.model_name import check_name
from budgetfit.integrations.model_sources.python_factory import load_factory
from budgetfit.integrations.model_sources.resolved_model import ResolvedModel
from budgetfit.utils.function_name import is_factory_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from typing_extensions import TypeIs


def resolve_model(
    model: nn.Module | PreTrainedConfig | str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
) -> ResolvedModel:
    """Resolve a model argument to a module and its source.

    A module is returned as it is; everything else is built without weights: of a
    transformers config, or text: a folder, a ``config.json``, a hub id,
    ``package.module:factory`` or ``file.py:factory``.

    Raises:
        InputError: It is no known kind of model, or cannot be built.
    """
    if is_keras_model(model):
        return _keras(model)
    if isinstance(model, nn.Module):
        return _module(model)
    text = os.fspath(model).strip() if isinstance(model, (str, os.PathLike)) else ""
    check_name(text)
    if is_factory_text(text):
        return _built(load_factory(text))
    # transformers is imported only where needed: that takes seconds.
    if text:
        from budgetfit.integrations.model_sources.transformers import load_model_on_meta  # noqa: PLC0415

        return load_model_on_meta(text, trust_remote_code=trust_remote_code)
    if _is_config(model):
        from budgetfit.integrations.model_sources.transformers import model_from_config  # noqa: PLC0415

        return model_from_config(model, trust_remote_code=trust_remote_code)
    raise InputError(
        f"A model is expected, not {_what(model)}: a torch.nn.Module, a transformers "
        "config, or text such as HuggingFaceTB/SmolLM2-1.7B, path/to/config.json or "
        "package.module:build."
    )


def is_keras_model(model: object) -> bool:
    """Whether it is a ``keras.Model``; does not import Keras."""
    keras: Any = sys.modules.get("keras")
    kind = getattr(keras, "Model", None)
    return isinstance(kind, type) and isinstance(model, kind)


def as_torch_module(model: Any) -> Any:
    """Return a Keras model as a module tree that shares its weights; else ``model``.

    Raises:
        InputError: Keras does not use the torch backend, or the model is not built.
    """
    if not is_keras_model(model):
        return model
    if not isinstance(model, nn.Module):
        raise InputError(
            f"The Keras model {model.name!r} does not run on torch. Set the "
            "environment variable KERAS_BACKEND=torch before keras is imported."
        )
    from budgetfit.integrations.model_sources.keras_model import KerasModel  # noqa: PLC0415 - of use here

    return KerasModel(model)


def _keras(model: Any) -> ResolvedModel:
    module = as_torch_module(model)
    notes = []
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        notes.append(
            f"the Keras model's own optimizer, {type(optimizer).__name__}, is not "
            "used: budgetfit trains with the plan's, which optimizer= chooses"
        )
    return ResolvedModel(
        model=module,
        name=model.name,
        source="the given Keras model",
        notes=tuple(notes),
    )


def _built(resolved: ResolvedModel) -> ResolvedModel:
    """Wrap the result of a factory, which may be a Keras model."""
    if not is_keras_model(resolved.model):
        return resolved
    make = resolved.materialize

    def materialize(
        device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> nn.Module:
        assert make is not None  # noqa: S101 - a factory can be called again
        return as_torch_module(make(device, dtype))

    return replace(
        _keras(resolved.model),
        materialize=materialize,
        batch=resolved.batch,
        loss=resolved.loss,
    )


def _is_config(model: object) -> TypeIs[PreTrainedConfig]:
    return any(parent.__name__ == "PreTrainedConfig" for parent in type(model).__mro__)


def _module(model: nn.Module) -> ResolvedModel:
    _check_layers(model)
    config = getattr(model, "config", None)
    path = getattr(config, "name_or_path", None)
    name = path.rstrip("/").rpartition("/")[2] if isinstance(path, str) else ""
    parameters = list(model.parameters())
    is_meta = bool(parameters) and all(parameter.is_meta for parameter in parameters)
    source = "the given module, on meta" if is_meta else "the given module"
    return ResolvedModel(model=model, name=name or type(model).__name__, source=source)


def _check_layers(model: nn.Module) -> None:
    """Refuse quantized layers whose memory is not that of their parameters."""
    # transformers records the quantization method on the model; bitsandbytes' layers
    # have traceable replacements.
    for module in model.modules():
        method = vars(module).get("quantization_method")
        name = str(getattr(method, "value", method) or "")
        if name not in ("", "bitsandbytes"):
            raise InputError(
                f"The weights of this {type(module).__name__} are quantised by {name}: "
                "what its layers take in training is not known here. Load the "
                "unquantised model, or dequantise it: model.dequantize(), or "
                "from_pretrained(..., quantization_config=...(dequantize=True)) where "
                "the method has that."
            )


def _what(model: object) -> str:
    if isinstance(model, type):
        # Of transformers and diffusers; Auto classes cannot be called at all.
        maker = ".from_pretrained" if hasattr(model, "from_pretrained") else ""
        return f"the class {model.__name__} (make one: {model.__name__}{maker}(...))"
    if callable(model):
        return f"the function {getattr(model, '__name__', model)} (call it)"
    return "empty text" if model == "" else f"a {type(model).__name__}"
