"""Disable transformers' generation cache (``use_cache``) while a model trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from budgetfit.applying.undo import Undo


def disable_generation_cache(model: nn.Module, undo: Undo) -> None:
    """Set ``config.use_cache`` to False where it is on, as transformers' Trainer does.

    Until ``undo``, ``save_pretrained`` still writes True: generation needs it.
    """
    changed: list[Any] = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            undo.add(setattr, config, "use_cache", True)
            config.use_cache = False
            changed.append(config)
    for module in model.modules() if changed else ():
        if callable(getattr(type(module), "save_pretrained", None)):
            undo.set_attribute(
                module, "save_pretrained", _SavePretrained(module, changed)
            )


class _SavePretrained:
    """Replacement of a model's ``save_pretrained``; is deep-copied with the model."""

    def __init__(self, model: nn.Module, configs: list[Any]) -> None:
        self._model, self._configs = model, configs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model with the original ``use_cache``."""
        now = [config.use_cache for config in self._configs]
        for config in self._configs:
            config.use_cache = True
        try:
            return type(self._model).save_pretrained(self._model, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            for config, value in zip(self._configs, now, strict=True):
                config.use_cache = value
