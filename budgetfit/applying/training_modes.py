"""``train()`` and ``eval()`` modes of modules, kept across evaluations."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class TrainingModes:
    """Puts a model into training mode and remembers the mode of each module.

    If the model is in evaluation mode, all of its modules are switched. Modules in
    evaluation mode within a training model (frozen batch norms) are intended: they
    stay so, after an evaluation too. Not intended is the base model under new adapters:
    peft's wrapper starts in training mode, around what ``from_pretrained`` returned in
    evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = module_modes(model)
        if not model.training or not _base(model).training:
            model.train()
        self._training_modes = module_modes(model)
        self._in_eval = [
            module for module, training in self._training_modes if not training
        ]
        self._warned = False

    def undo(self) -> None:
        """Restore the original mode of each module."""
        _, training = self._before[0]
        if self._model.training != training:
            self._model.train(training)
        _set(self._before)

    def resume(self) -> None:
        """Restore the training modes after an evaluation (``model.eval()``)."""
        # Warns once if modules that were in evaluation mode train now: they save more
        # activations than was planned. Modules are told by their ``train``: some do
        # more there, as to take adapters out of a weight again.
        if not self._model.training:
            self._model.train()
            for module in self._in_eval:
                module.eval()
            _set(self._training_modes)
            return
        thawed = [module for module in self._in_eval if module.training]
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
    """Return a note on modules in evaluation mode within a training model."""
    if not model.training or not _base(model).training:
        return ()
    kept = [module for module in model.modules() if not module.training]
    if not kept:
        return ()
    return (f"{_named(kept)} are in evaluation mode and stay in it while training",)


@contextmanager
def restored_modes(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set earlier modes of modules inside the context, then the current ones again."""
    changed = [(module, mode) for module, mode in modes if module.training != mode]
    _set(changed)
    try:
        yield
    finally:
        _set([(module, not mode) for module, mode in changed])


def _base(model: nn.Module) -> nn.Module:
    """Return the model inside peft's wrapper, or the model itself."""
    find: Any = getattr(model, "get_base_model", None)
    return find() if callable(find) and hasattr(model, "peft_config") else model


def module_modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return each module and whether it is in training mode."""
    return [(module, module.training) for module in model.modules()]


def _set(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _named(modules: list[nn.Module]) -> str:
    counted = Counter(type(module).__name__ for module in modules)
    return ", ".join(f"{count} {name}" for name, count in counted.most_common(3))
