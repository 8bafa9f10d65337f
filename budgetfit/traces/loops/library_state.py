"""Keep what libraries store for the whole process out of a trace, and put it back."""

import contextlib
import importlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _foreach_utils


@contextlib.contextmanager
def library_state_preserved() -> Iterator[None]:
    """Let a library's training loop run on fake tensors, and leave no traces of it.

    Restored are accelerate's state of the process, which an ``Accelerator`` of the
    user's may share, environment variables, the loggers' silence and torch's choice of
    ``foreach``, which refuses fakes.
    """
    clip = torch.nn.utils.clip_grad
    environment = dict(os.environ)
    before = logging.root.manager.disable
    with (
        _accelerate_state(),
        warnings.catch_warnings(),
        mock.patch.object(
            clip,
            "_has_foreach_support",
            lambda _, device: _foreach_utils._device_has_foreach_support(device),
        ),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
            os.environ.clear()
            os.environ.update(environment)


@contextlib.contextmanager
def _accelerate_state() -> Iterator[None]:
    state: Any = importlib.import_module("accelerate.state")
    kinds = (state.PartialState, state.AcceleratorState, state.GradientState)
    kept = [dict(kind._shared_state) for kind in kinds]
    for kind in kinds:
        kind._shared_state.clear()
    try:
        yield
    finally:
        for kind, shared in zip(kinds, kept, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(shared)


@contextlib.contextmanager
def modules_restored() -> Iterator[None]:
    """Put back what a kernel library replaces in transformers' modules and classes."""
    # Liger patches the instance that trains, and the functions and classes around it
    # (liger-kernel 0.8.5, ``apply_liger_kernel_to_llama``: ``apply_rotary_pos_emb``).
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("transformers.models.", "transformers.loss."))
    ]
    classes = [
        value
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    patched: list[Any] = [torch.nn.functional, *modules, *classes]
    kept = [(each, dict(vars(each))) for each in patched]
    try:
        yield
    finally:
        for each, before in kept:
            _restore(each, before)


def _restore(patched: Any, before: dict[str, Any]) -> None:
    for name, value in list(vars(patched).items()):
        if name not in before and not isinstance(value, types.ModuleType):
            delattr(patched, name)
        elif before.get(name, value) is not value:
            setattr(patched, name, before[name])
