"""Dry run of a forward on fake tensors, to validate an example batch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from budgetfit.batches.batch_tree import Batch, map_batch
from budgetfit.errors import TraceError
from budgetfit.tracing.fake.model_copy import (
    fake_copy,
    fake_mode,
    silence_fake_tensor_log,
)
from budgetfit.tracing.isolation.cuda_device_names import CudaDevicesOnCpu
from budgetfit.tracing.isolation.lru_caches import lru_caches_cleared
from budgetfit.tracing.isolation.python_state import python_state_preserved
from budgetfit.tracing.isolation.user_state import user_state_preserved
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.values.known_values import KnownValues
from budgetfit.tracing.values.library_patches import patch_libraries

# Values are needed, which only a full trace has; the shapes matched so far.
_DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def forward_accepts(model: nn.Module, batch: Batch) -> bool:
    """Whether the forward of a fake copy of ``model`` accepts a batch of these shapes.

    True if unknown: the model cannot be copied or has data-dependent control flow, or
    has recurrent layers, which are slow on fake tensors. Neither the model nor the RNG
    state changes.
    """
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return True
    with _fakes_for(model) as mode:
        try:
            fake_model = fake_copy(model, mode)
            with CudaDevicesOnCpu() as device:
                here = map_batch(batch, device.on_cpu)
                _call(fake_model, map_batch(here, mode.from_tensor))
        except (TraceError, *_DATA_DEPENDENT_ERRORS):
            return True
        except Exception:  # noqa: BLE001 - a user's forward may raise anything
            return False
    return True


def call_on_fakes(
    model: nn.Module, call: Callable[[nn.Module, Any], object], inputs: object
) -> object:
    """Return what ``call`` returns for a fake copy of a model and fake inputs.

    Values of whole numbers are known, as in a trace. Whatever ``call`` raises is
    raised. Neither the model nor the RNG state changes.
    """
    values = KnownValues()

    def known(tensor: torch.Tensor) -> torch.Tensor:
        fake = mode.from_tensor(tensor)
        values.record(fake, tensor)
        return fake

    with _fakes_for(model) as mode:
        fake_model = fake_copy(model, mode, on_fake=values.record_weight)
        fakes = map_batch(inputs, known)
        with patch_libraries(values), StorageLog(None, values.run):
            return call(fake_model, fakes)


@contextlib.contextmanager
def _fakes_for(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Run with fake tensors; afterwards the model and Python's state are as before."""
    with (
        silence_fake_tensor_log(),
        python_state_preserved(),
        lru_caches_cleared(list(model.modules())),
        user_state_preserved(model),
        fake_mode() as mode,
        torch.no_grad(),
    ):
        yield mode


def _call(model: nn.Module, batch: Batch) -> object:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)
