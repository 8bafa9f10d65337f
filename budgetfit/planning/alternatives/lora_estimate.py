"""LoRA estimate: a meta copy of the model with LoRA layers, made without peft.

As peft 0.21 makes it with ``target_modules="all-linear"``, rank 16, no dropout: the
base is frozen, every linear layer but the output's gets two small fp32 matrices, and
their input is converted to fp32 on the way in and the sum back on the way out
(``peft/tuners/lora/layer.py``, ``Linear.forward``). Heads of classes and spans are
trained as a whole: their copies, beside the frozen originals.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from budgetfit.applying.loss.call_model import is_transformers_model
from budgetfit.applying.meta_copy import copy_to_meta
from budgetfit.applying.pytree import map_tensors
from budgetfit.core.adapter import trained_heads
from budgetfit.workload.diffusers_targets import attention_projections

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


class TrainedHead(nn.Module):
    """A copy of a head that is trained, beside the frozen original."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.original_module = head
        self.copy = copy.deepcopy(head).requires_grad_(True)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return what the copy returns."""
        out: torch.Tensor = self.copy(*inputs)
        return out


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
    heads = tuple(trained_heads(type(workload.model).__name__))
    output = None
    if is_transformers_model(adapted_model):  # else peft does not know the output's
        known: Any = adapted_model
        output = known.get_output_embeddings()
    # Of models of diffusers only these, as where method="lora" is asked for.
    targets = attention_projections(adapted_model)
    ends = tuple(f".{target}" for target in targets) or ("",)
    made: dict[str, nn.Module] = {}
    for name, module in adapted_model.named_modules():
        parents = tuple(f"{replaced}." for replaced in made)
        widths = _widths(module)
        if not name or name.startswith(parents) or module is output:
            continue
        if heads and name.endswith(heads):
            made[name] = TrainedHead(module)
        elif widths is not None and f".{name}".endswith(ends):
            made[name] = LoraLinear(module, *widths)
    inside = tuple(f"{block}." for block in workload.blocks)
    if not any(f"{name}.".startswith(inside) for name in made):
        return None
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        setattr(adapted_model.get_submodule(parent), child, module)
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
