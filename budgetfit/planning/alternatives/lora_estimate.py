"""LoRA estimate: a meta copy of the model with LoRA layers, made without peft.

As peft 0.21 makes it with ``target_modules="all-linear"``, rank 16, no dropout: the
base is frozen, every linear layer inside the blocks gets two small fp32 matrices, and
their input is converted to fp32 on the way in and the sum back on the way out
(``peft/tuners/lora/layer.py``, ``Linear.forward``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from budgetfit.applying.meta_copy import copy_to_meta
from budgetfit.applying.pytree import map_tensors

if TYPE_CHECKING:
    from budgetfit.workload.workload import Workload

LORA_RANK: Final = 16


class LoraLinear(nn.Module):
    """A frozen linear layer and its adapter: ``base(x) + B(A(x))``."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = base
        with torch.device("meta"):
            self.lora_A = nn.Linear(inputs, LORA_RANK, bias=False)
            self.lora_B = nn.Linear(LORA_RANK, outputs, bias=False)
        self.scaling = 1.0

    @property
    def weight(self) -> object:
        """The base layer's: models read its dtype."""
        return self.base_layer.weight

    @property
    def bias(self) -> object:
        """The base layer's."""
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter's output to the base layer's."""
        out: torch.Tensor = self.base_layer(x)
        # Local names keep tensors alive: one expression, as in peft.
        x = x.to(self.lora_A.weight.dtype)
        return (out + self.lora_B(self.lora_A(x)) * self.scaling).to(out.dtype)


def lora_workload(
    workload: Workload, base_dtype: torch.dtype | None
) -> Workload | None:
    """Return the workload with a frozen base model and LoRA adapters.

    Args:
        workload: Not changed; its weights are not copied.
        base_dtype: Dtype for the frozen weights and floating-point inputs; None leaves
            them.

    Returns:
        None where no block has a linear layer.

    Raises:
        TraceError: If the model cannot be copied.
    """
    adapted_model = copy_to_meta(workload.model, dtype=base_dtype, frozen=True)
    adapted = 0
    for block in workload.blocks:
        for name, module in list(adapted_model.get_submodule(block).named_modules()):
            widths = _widths(module)
            if widths is None:
                continue
            path = f"{block}.{name}" if name else block
            parent, _, child = path.rpartition(".")
            setattr(
                adapted_model.get_submodule(parent) if parent else adapted_model,
                child,
                LoraLinear(module, *widths),
            )
            adapted += 1
    if not adapted:
        return None
    return replace(
        workload, model=adapted_model, batch=_converted(workload.batch, base_dtype)
    )


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Return in and out features of a linear layer; None for every other module."""
    # Exactly these classes, as subclasses may use their weight differently.
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module).__qualname__ == "Conv1D" and isinstance(
        weight := getattr(module, "weight", None), torch.Tensor
    ):  # transformers' GPT-2: a linear layer with its weight transposed
        return weight.shape[0], weight.shape[1]
    return None


def _converted(batch: object, dtype: torch.dtype | None) -> object:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        # On the CPU, as GPU memory is needed for training; meta tensors stay on meta.
        return tensor.to(tensor.device if tensor.is_meta else "cpu", dtype)

    return batch if dtype is None else map_tensors(batch, convert)
