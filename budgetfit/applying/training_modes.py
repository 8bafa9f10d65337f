"""Training and evaluation modes: which modules train, now and after an evaluation."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class TrainingModes:
    """The mode of each module of a model that is put into training mode.

    A model in evaluation mode trains with all of its modules. Modules in evaluation
    mode within a model that trains (frozen batch norms) are meant to be: they stay in
    it, after an evaluation too. The base under new adapters is not meant to be: peft's
    wrapper begins in training mode, around a model as ``from_pretrained`` leaves it.

    Args:
        model: Put into training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = modes_of(model)
        if not model.training or not _base(model).training:
            model.train()
        self._chosen = modes_of(model)
        self._kept = [module for module, training in self._chosen if not training]
        self._warned = False

    def undo(self) -> None:
        """Give each module the mode that it had."""
        _set(self._before)

    def resume(self) -> None:
        """Return to training after an evaluation, which puts all modules in its mode.

        Warns, once, where somebody else has put modules into training mode that were
        not to be: they save more than was planned.
        """
        if not self._model.training:
            _set(self._chosen)
            return
        thawed = [module for module in self._kept if module.training]
        if thawed and not self._warned:
            self._warned = True
            warnings.warn(
                f"{_named(thawed)} were in evaluation mode when this run began and "
                "train now: after model.train(), put them back with .eval(), or plan "
                "again for what trains. Their values change and they take more memory "
                "than was planned.",
                stacklevel=5,
            )


def mode_notes(model: nn.Module) -> tuple[str, ...]:
    """Say which modules of a model that trains stay in evaluation mode."""
    if not model.training or not _base(model).training:
        return ()
    kept = [module for module in model.modules() if not module.training]
    if not kept:
        return ()
    return (f"{_named(kept)} are in evaluation mode and stay in it while training",)


@contextmanager
def modes_as_before(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Give modules the mode that they had, and then the one that they have now."""
    changed = [(module, mode) for module, mode in modes if module.training != mode]
    _set(changed)
    try:
        yield
    finally:
        _set([(module, not mode) for module, mode in changed])


def _base(model: nn.Module) -> nn.Module:
    """Return what peft's wrapper is around, or the model itself."""
    find: Any = getattr(model, "get_base_model", None)
    return find() if callable(find) and hasattr(model, "peft_config") else model


def modes_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return each module and whether it is in training mode."""
    return [(module, module.training) for module in model.modules()]


def _set(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _named(modules: list[nn.Module]) -> str:
    counted = Counter(type(module).__name__ for module in modules)
    return ", ".join(f"{count} {name}" for name, count in counted.most_common(3))
