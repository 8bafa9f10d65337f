"""What a model with LoRA adapters would be, without weights and without peft.

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

from budgetfit.applying.meta_copy import weightless_copy
from budgetfit.applying.pytree import map_tensors

if TYPE_CHECKING:
    from budgetfit.workload.workload import Subject

RANK: Final = 16


class LoraLinear(nn.Module):
    """A frozen linear layer and its adapter: ``base(x) + B(A(x))``.

    Args:
        base: The layer.
        inputs: Width of what comes in.
        outputs: Width of what goes out.
    """

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = base
        with torch.device("meta"):
            self.lora_A = nn.Linear(inputs, RANK, bias=False)
            self.lora_B = nn.Linear(RANK, outputs, bias=False)
        self.scaling = 1.0

    @property
    def weight(self) -> object:
        """The base's: models ask for its dtype."""
        return self.base_layer.weight

    @property
    def bias(self) -> object:
        """The base's."""
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter to what the base makes."""
        out: torch.Tensor = self.base_layer(x)
        # Names keep tensors alive: in one expression, as the library has it.
        x = x.to(self.lora_A.weight.dtype)
        return (out + self.lora_B(self.lora_A(x)) * self.scaling).to(out.dtype)


def lora_twin(subject: Subject, base_dtype: torch.dtype | None) -> Subject | None:
    """Return the subject with adapters instead of its weights.

    Args:
        subject: It is not changed, and its weights are not copied.
        base_dtype: What the frozen weights and the batch's floats are converted to;
            None leaves them.

    Returns:
        None where no block has a linear layer.

    Raises:
        TraceError: If the model cannot be copied.
    """
    twin = weightless_copy(subject.model, dtype=base_dtype, frozen=True)
    adapted = 0
    for block in subject.blocks:
        for name, module in list(twin.get_submodule(block).named_modules()):
            widths = _widths(module)
            if widths is None:
                continue
            path = f"{block}.{name}" if name else block
            parent, _, child = path.rpartition(".")
            setattr(
                twin.get_submodule(parent) if parent else twin,
                child,
                LoraLinear(module, *widths),
            )
            adapted += 1
    if not adapted:
        return None
    return replace(subject, model=twin, batch=_converted(subject.batch, base_dtype))


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Return what goes in and out of a linear layer; None for every other module.

    Exactly these classes, as subclasses may use their weight in another way.
    """
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
        # Not on the card, which is the training's; what is on meta stays there.
        return tensor.to(tensor.device if tensor.is_meta else "cpu", dtype)

    return batch if dtype is None else map_tensors(batch, convert)
