"""A copy of a model in fake tensors: same modules, no weights (tracing T2)."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from budgetfit.core.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of ``model`` whose parameters and buffers are fake CPU tensors.

    The model may live on the CPU, on CUDA or on meta; it is not changed. Tied parameters
    stay tied and ``requires_grad`` stays.

    Raises:
        TraceError: If the model cannot be deep-copied.
    """
    try:
        with FakeCopyMode(mode):
            twin = copy.deepcopy(model)
    except Exception as error:
        raise TraceError(
            f"The model cannot be copied: {type(error).__name__}: {error}. Remove what "
            "cannot be deep-copied (locks, generators, open files) from its attributes.",
            module=type(model).__name__,
            op="deepcopy",
        ) from error
    _on_cpu(twin, mode)
    return twin


def _on_cpu(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter and buffer by a fake CPU one, in their dictionaries.

    ``Module.to`` on fake parameters fails with "Couldn't swap", and a model from meta
    comes out of the copy on meta and without its ``Parameter`` type.
    """
    made: dict[int, torch.Tensor] = {}

    def twin_of(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]):  # noqa: ANN202
        if id(tensor) not in made:
            with mode:
                empty = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype
                )
                made[id(tensor)] = make(empty)
        return made[id(tensor)]

    keep: list[torch.Tensor] = []  # ids stay taken while we compare them
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                keep.append(parameter)
                module._parameters[name] = twin_of(
                    parameter,
                    lambda x, p=parameter: nn.Parameter(
                        x, requires_grad=p.requires_grad
                    ),
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                keep.append(buffer)
                module._buffers[name] = twin_of(buffer, lambda x: x)


@contextlib.contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """A fresh fake mode that accepts the small real tensors that models make in forward."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode
