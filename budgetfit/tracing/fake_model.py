"""A copy of a model in fake tensors: same modules, no weights (tracing T2)."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from budgetfit.core.errors import TraceError
from budgetfit.tracing.shortened_twin import close_up, holes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from budgetfit.tracing.shortened_twin import Shortening


def fake_copy(
    model: nn.Module, mode: FakeTensorMode, short: Shortening | None = None
) -> nn.Module:
    """Return a deep copy of ``model`` with fake parameters and buffers on the CPU.

    The model may live on the CPU, on CUDA or on meta; it is not changed. Tied
    parameters stay tied and ``requires_grad`` stays. With ``short`` the copy is a
    twin without some blocks.

    Raises:
        TraceError: If the model cannot be deep-copied.
    """
    try:
        with FakeCopyMode(mode):
            left_out = {} if short is None else holes(model, short.left_out)
            twin = copy.deepcopy(model, left_out)
    except Exception as error:
        raise TraceError(
            f"The model cannot be copied: {type(error).__name__}: {error}. Remove "
            "what cannot be deep-copied (locks, generators, open files) from its "
            "attributes.",
            module=type(model).__name__,
            op="deepcopy",
        ) from error
    if short is not None:
        close_up(twin, short)
    _on_cpu(twin, mode)
    return twin


def _on_cpu(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters, buffers and other tensors by fake CPU ones, in place.

    ``Module.to`` on fake parameters fails with "Couldn't swap", and a model from meta
    comes out of the copy on meta and without its ``Parameter`` type.
    """
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    others: dict[torch.Tensor, torch.Tensor] = {}

    def empty_like(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype
            )

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in parameters:
                parameters[parameter] = nn.Parameter(
                    empty_like(parameter), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = parameters[parameter]
        for attributes in (module._buffers, module.__dict__):
            for name, tensor in attributes.items():
                if isinstance(tensor, torch.Tensor):
                    if tensor not in others:
                        others[tensor] = empty_like(tensor)
                    attributes[name] = others[tensor]


@contextlib.contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Enter a fake mode that takes the small real tensors that models make."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode
