"""What a made batch is asked for, and the valid random values it is filled with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from budgetfit.core.sample_dims import FIRST, SampleDims

_SEED = 0  # any: only shapes decide about memory, but two plans must agree


@dataclass(frozen=True)
class BatchRequest:
    """One call of ``make_batch``: the wishes, and the notes collected on the way.

    Attributes:
        model: The model that the batch is made for; only read.
        batch_size: Samples in the batch.
        max_length: Sequence length that the user asked for.
        image_size: Height and width in pixels that the user asked for.
        text_only: Whether images and sound are left out.
        dims: In which dimension the model's own example counts samples.
        used: Names of wishes that had a say.
        notes: What was assumed, in plain words.
        generator: A generator of its own, so that the global one stays untouched.
    """

    model: nn.Module
    batch_size: int
    max_length: int | None
    image_size: tuple[int, int] | None = None
    text_only: bool = False
    dims: SampleDims = FIRST
    used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    generator: torch.Generator = field(
        default_factory=lambda: torch.Generator("cpu").manual_seed(_SEED)
    )

    def sides_of_images(self, usual: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width that were asked for, else the usual ones."""
        self.used.add("image_size")
        return self.image_size or usual

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Return CPU int64 values in ``[low, high)``; ``high`` is at least low + 1."""
        return torch.randint(
            low,
            max(high, low + 1),
            tuple(shape),
            generator=self.generator,
            dtype=torch.int64,
            device="cpu",
        )

    def floats(self, shape: Sequence[int]) -> Tensor:
        """Return CPU values of a normal distribution in the model's float dtype."""
        values = torch.randn(
            tuple(shape), generator=self.generator, dtype=torch.float32, device="cpu"
        )
        return values.to(self.float_dtype)

    @property
    def float_dtype(self) -> torch.dtype:
        """The dtype of the model's first floating parameter, else float32.

        A pure bf16 model refuses float32 inputs, so what is made for it is bf16.
        """
        for parameter in self.model.parameters():
            if parameter.dtype in (torch.float64, torch.float16, torch.bfloat16):
                return parameter.dtype
            if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
                return torch.float32
        return torch.float32


def forward_arguments(model: nn.Module) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that ``model.forward`` takes, and those without a default."""
    takes, needs = [], []
    for name, parameter in signature(model.forward).parameters.items():
        if parameter.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            continue
        takes.append(name)
        if parameter.default is Parameter.empty:
            needs.append(name)
    return frozenset(takes), tuple(needs)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT, ``torch.compile`` and data-parallel wrappers."""
    while True:
        inner: Any = None
        if callable(getattr(model, "get_base_model", None)):
            inner = model.get_base_model()  # type: ignore[operator]
        elif type(model).__name__ in (
            "OptimizedModule",
            "DataParallel",
            "DistributedDataParallel",
        ):
            inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner
