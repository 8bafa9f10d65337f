"""A copy of a model without its weights: same modules, every tensor on meta."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.errors import TraceError
from budgetfit.utils.copy_model import copied

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_WHOLE_NUMBERS = 1 << 20  # whose values are kept


def weightless_copy(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    frozen: bool = False,
    small_values: bool = False,
    replace: Callable[[nn.Module], nn.Module | None] = lambda _: None,
) -> nn.Module:
    """Return a deep copy whose tensors are on meta, tied as before.

    Args:
        model: Not changed; no weight is read or copied.
        dtype: What floating-point parameters become; None keeps theirs.
        frozen: Whether no parameter of the copy is trained.
        small_values: Whether whole numbers and masks of moderate size keep their
            values: models ask their buffers questions.
        replace: Returns what stands for a module in the copy, or None to copy it. A
            parameter that the replacement shares with the model is replaced as well.

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
        for tensors in (module._buffers, module.__dict__):  # noqa: SLF001 - as deepcopy
            for tensor in tensors.values():
                # Among them what pruning and weight norms compute: it has a graph, and
                # such a tensor cannot be copied.
                if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                    keeps = small_values and _is_small_and_whole(tensor)
                    memo[id(tensor)] = (
                        tensor.to("cpu", copy=True) if keeps else _on_meta(tensor)
                    )
        stand_in = replace(module)
        if stand_in is not None:
            memo[id(module)] = stand_in
            own = stand_in._parameters  # noqa: SLF001
            own.update({name: memo.get(id(p), p) for name, p in own.items()})
    try:
        return copied(model, memo)
    except Exception as error:
        raise TraceError(
            f"The model cannot be copied: {type(error).__name__}: {error}. Remove "
            "what cannot be deep-copied (locks, generators, open files) from its "
            "attributes.",
            module=type(model).__name__,
            op="deepcopy",
        ) from error


def _is_small_and_whole(tensor: torch.Tensor) -> bool:
    return (
        not tensor.is_meta
        and not (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() <= MOST_WHOLE_NUMBERS
    )


def _on_meta(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta"
    )
