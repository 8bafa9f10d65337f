"""CudaTarget: the GPU and the PyTorch version that a trace is for."""

from dataclasses import dataclass

import torch


def installed_torch_version() -> tuple[int, int]:
    """Return (major, minor) of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTarget:
    """What decides which CUDA kernels run; the replay sizes their memory.

    Attributes:
        compute_capability: (major, minor) of the GPU.
        torch_version: (major, minor) of the PyTorch that will train.
        cudnn: Whether cuDNN is enabled, as it is by default.
        sm_count: Multiprocessors of the GPU, which libraries of Triton kernels and
            compiled code size buffers by; None where there are none of these.
        threads_per_sm: Threads that a multiprocessor holds, likewise.
    """

    compute_capability: tuple[int, int]
    torch_version: tuple[int, int]
    cudnn: bool = True
    sm_count: int | None = None
    threads_per_sm: int | None = None
