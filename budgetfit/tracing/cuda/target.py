"""CudaTarget: the card and the PyTorch that a trace stands for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def installed_torch_version() -> tuple[int, int]:
    """Return (major, minor) of the torch that is running."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTarget:
    """What decides which kernels run. How much they take is for the replay to say.

    Attributes:
        compute_capability: Of the card.
        torch_version: (major, minor) of the PyTorch that will train.
        cudnn: Whether cuDNN is switched on, as it is by default.
    """

    compute_capability: tuple[int, int]
    torch_version: tuple[int, int]
    cudnn: bool = True
