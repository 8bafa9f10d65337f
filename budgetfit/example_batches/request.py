"""Request for an example batch: options, notes and a random generator."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from budgetfit.core.samples.sample_dims import FIRST_DIM, SampleDims

Arguments = dict[str, Any]  # keyword arguments of a model's forward

_SEED = 0  # arbitrary; fixed, so that plans are reproducible


@dataclass(frozen=True)
class BatchRequest:
    """Options of one ``make_batch`` call, and the notes collected on the way.

    Attributes:
        requested_length: Requested sequence length; read as ``max_length``.
        image_size: Requested height and width in pixels.
        frames: Requested frames of a video.
        text_only: Whether images and audio are left out.
        padded: Whether all samples but the first end in padding.
        dims: The sample dimension of the model's own example inputs.
        used: Names of options that had an effect.
        generator: Private, so that the global RNG state is not changed.
    """

    model: nn.Module
    batch_size: int
    requested_length: int | None
    image_size: tuple[int, int] | None = None
    frames: int | None = None
    text_only: bool = False
    padded: bool = False
    dims: SampleDims = FIRST_DIM
    used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    generator: torch.Generator = field(
        default_factory=lambda: torch.Generator("cpu").manual_seed(_SEED)
    )

    @property
    def max_length(self) -> int | None:
        """The requested sequence length, which is used from here on."""
        self.used.add("max_length")
        return self.requested_length

    def image_size_or(self, default: tuple[int, int]) -> tuple[int, int]:
        """Return the requested height and width, else the default."""
        self.used.add("image_size")
        return self.image_size or default

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
        """Return normal random CPU values in the model's float dtype."""
        values = torch.randn(
            tuple(shape), generator=self.generator, dtype=torch.float32, device="cpu"
        )
        return values.to(self.float_dtype)

    @staticmethod
    def ones(shape: Sequence[int]) -> Tensor:
        """Return CPU int64 ones: a mask that masks nothing."""
        return torch.ones(tuple(shape), dtype=torch.int64, device="cpu")

    @property
    def float_dtype(self) -> torch.dtype:
        """The dtype of the model's first floating parameter, else float32."""
        # A pure bf16 model refuses float32 inputs.
        for parameter in self.model.parameters():
            if parameter.dtype in (torch.float64, torch.float16, torch.bfloat16):
                return parameter.dtype
            if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
                return torch.float32
        return torch.float32


def forward_arguments(model: nn.Module) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return all argument names of ``model.forward``, and the required ones."""
    takes, needs = [], []
    for name, parameter in signature(model.forward).parameters.items():
        if parameter.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            continue
        takes.append(name)
        if parameter.default is Parameter.empty:
            needs.append(name)
    return frozenset(takes), tuple(needs)
