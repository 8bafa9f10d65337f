"""Whatever a user calls a model: a module, a config, a path, a hub id, a factory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch import nn

from budgetfit.core.errors import InputError
from budgetfit.integrations.python_factory import is_factory_text, load_factory
from budgetfit.integrations.resolved_model import ResolvedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from typing_extensions import TypeIs

__all__ = ["ResolvedModel", "resolve_model"]


def resolve_model(
    model: nn.Module | PreTrainedConfig | str | os.PathLike[str],
    *,
    trust_remote_code: bool = False,
) -> ResolvedModel:
    """Return the model that was meant, and where it came from.

    A module is handed through untouched; everything else is built without weights.

    Args:
        model: A module; a transformers config; or text: a folder, a ``config.json``, a
            hub id, ``package.module:factory`` or ``file.py:factory``.
        trust_remote_code: Let code that a config names run.

    Raises:
        InputError: Nothing is meant by it, or it cannot be built.
    """
    if isinstance(model, nn.Module):
        return _module(model)
    text = os.fspath(model).strip() if isinstance(model, (str, os.PathLike)) else ""
    if is_factory_text(text):
        return load_factory(text)
    # transformers only where it is needed: importing it takes seconds.
    if text:
        from budgetfit.integrations.transformers import (  # noqa: PLC0415
            load_model_on_meta,
        )

        return load_model_on_meta(text, trust_remote_code=trust_remote_code)
    if _is_config(model):
        from budgetfit.integrations.transformers import (  # noqa: PLC0415
            model_from_config,
        )

        return model_from_config(model, trust_remote_code=trust_remote_code)
    raise InputError(
        f"A model is expected, not {_what(model)}: a torch.nn.Module, a transformers "
        "config, or text such as HuggingFaceTB/SmolLM2-1.7B, path/to/config.json or "
        "package.module:build."
    )


def _is_config(model: object) -> TypeIs[PreTrainedConfig]:
    return any(parent.__name__ == "PreTrainedConfig" for parent in type(model).__mro__)


def _module(model: nn.Module) -> ResolvedModel:
    config = getattr(model, "config", None)
    path = getattr(config, "name_or_path", None)
    name = path.rstrip("/").rpartition("/")[2] if isinstance(path, str) else ""
    parameters = list(model.parameters())
    is_meta = bool(parameters) and all(parameter.is_meta for parameter in parameters)
    source = "the given module, on meta" if is_meta else "the given module"
    return ResolvedModel(model=model, name=name or type(model).__name__, source=source)


def _what(model: object) -> str:
    if isinstance(model, type):
        return f"the class {model.__name__} (make one: {model.__name__}(...))"
    if callable(model):
        return f"the function {getattr(model, '__name__', model)} (call it)"
    return "empty text" if model == "" else f"a {type(model).__name__}"
