"""Whether a model's forward takes a batch: tried on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from budgetfit.batches.batch_tree import Batch, change_tensors
from budgetfit.errors import TraceError
from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode, quiet_fakes
from budgetfit.tracing.isolation.cuda_device_names import OneDevice
from budgetfit.tracing.isolation.lru_caches import no_fakes_remembered
from budgetfit.tracing.isolation.python_state import quiet_machine

# What a trace knows and this does not: values. Up to there the shapes went together.
_ASKS_FOR_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def runs(model: nn.Module, batch: Batch) -> bool:
    """Whether the forward of a copy of ``model`` takes a batch of these shapes.

    True where it cannot be known: the model cannot be copied, or asks for values; and
    with recurrent layers, whose time steps fake tensors take one by one. Neither model
    nor random state change.
    """
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return True
    with (
        quiet_fakes(),
        quiet_machine(),
        no_fakes_remembered(model),
        fake_mode() as mode,
        torch.no_grad(),
    ):
        try:
            twin = fake_copy(model, mode)
            with OneDevice() as device:
                here = change_tensors(batch, device.here)
                _call(twin, change_tensors(here, mode.from_tensor))
        except (TraceError, *_ASKS_FOR_VALUES):
            return True
        except Exception:  # noqa: BLE001 - a user's forward may raise anything
            return False
    return True


def _call(model: nn.Module, batch: Batch) -> Any:  # noqa: ANN401
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)
