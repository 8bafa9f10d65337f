"""Deep copy of a model on the meta device, without its small whole numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from budgetfit.errors import TraceError
from budgetfit.utils.copy_model import deepcopy_model

MAX_KEPT_ELEMENTS = 1 << 20


def copy_to_meta(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    frozen: bool = False,
    replace: Callable[[nn.Module], nn.Module | None] = lambda _: None,
) -> nn.Module:
    """Return a deep copy on the meta device; tied parameters stay tied.

    Integer and bool tensors up to ``MAX_KEPT_ELEMENTS`` that are no parameters are
    copied to the CPU instead: forwards, and sizes of layers, read their values.

    No weight is read or copied. ``dtype``: of floating-point parameters in the copy;
    None keeps theirs. ``frozen``: no parameter of the copy requires a gradient.
    ``replace`` returns the replacement of a module in the copy, or None to copy it;
    parameters that it shares with the model are copied to meta.

    Raises:
        TraceError: If the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        trained = parameter.requires_grad and not frozen
        kind = dtype if dtype is not None and parameter.is_floating_point() else None
        memo[id(parameter)] = nn.Parameter(
            _on_meta(parameter, kind), requires_grad=trained
        )
    for module in model.modules():
        for tensors in (module._buffers, module.__dict__):
            for tensor in tensors.values():
                # Pruning and weight norm compute attributes that have a graph, and
                # deepcopy refuses such tensors.
                if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                    keeps = _is_small_integer(tensor)
                    memo[id(tensor)] = (
                        tensor.to("cpu", copy=True) if keeps else _on_meta(tensor)
                    )
        replacement = replace(module)
        if replacement is not None:
            memo[id(module)] = replacement
            own = replacement._parameters
            own.update({name: memo.get(id(p), p) for name, p in own.items()})
    try:
        return deepcopy_model(model, memo)
    except Exception as error:
        raise TraceError(
            f"The model cannot be copied: {type(error).__name__}: {error}. Remove "
            "what cannot be deep-copied (locks, generators, open files) from its "
            "attributes.",
            module=type(model).__name__,
            op="deepcopy",
        ) from error


def _is_small_integer(tensor: torch.Tensor) -> bool:
    return (
        not tensor.is_meta
        and not (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() <= MAX_KEPT_ELEMENTS
    )


def _on_meta(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta"
    )
