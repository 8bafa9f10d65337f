"""A copy of a model in fake tensors: same modules, no weights (tracing T2)."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from budgetfit.core.errors import TraceError
from budgetfit.tracing.fake_tensors import FakeTensors
from budgetfit.tracing.shortened_twin import close_up, holes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import nn

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
    fakes = _fakes_of_tensors(model, mode, () if short is None else short.left_out)
    try:
        with FakeCopyMode(mode):
            left_out = {} if short is None else holes(model, short.left_out)
            twin = copy.deepcopy(model, left_out | fakes)
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
    return twin


def _fakes_of_tensors(
    model: nn.Module, mode: FakeTensorMode, left_out: Collection[str]
) -> dict[int, Any]:
    """Return a ``deepcopy`` memo with a fake CPU tensor for each of a model's tensors.

    These are parameters, buffers and other tensors that modules have. ``Module.to`` on
    fake parameters fails with "Couldn't swap", and a copied parameter from meta stays
    on meta and loses its ``Parameter`` type.
    """
    fakes = FakeTensors(mode)
    memo: dict[int, Any] = {}
    seen = {model.get_submodule(name) for name in left_out}
    for _, module in model.named_modules(seen):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = fakes.parameter(parameter)
        for tensor in (*module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = fakes.empty(
                    tensor.shape, tensor.stride(), tensor.dtype
                )
    return memo


@contextlib.contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Enter a fake mode that takes the small real tensors that models make."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode
