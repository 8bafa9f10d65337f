"""Keep what libraries store for the whole process out of a trace, and put it back."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils import _foreach_utils

if TYPE_CHECKING:
    from collections.abc import Iterator


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
