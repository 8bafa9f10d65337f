"""Which PyTorch builds have kernels for a GPU's compute capability."""

from typing import Final

from budgetfit.gpus.table import Gpu

CUDA_13_LOWEST_CAPABILITY: Final = (7, 5)  # CUDA 13 dropped older capabilities
# PyTorch publishes builds for CUDA 12 up to this release (pytorch/pytorch, issue
# 190385); the one for 12.6 is the last with Maxwell, Pascal and Volta.
_LAST_WITH_CUDA_12: Final = "2.14"


def builds_note(gpu: Gpu) -> str | None:
    """Return a note on the builds needed for an old GPU; None if any will do."""
    if gpu.compute_capability >= CUDA_13_LOWEST_CAPABILITY:
        return None
    major, minor = gpu.compute_capability
    return (
        f"{gpu.title} (capability {major}.{minor}) trains with PyTorch's builds for "
        f"CUDA 12.6 alone, the last of them torch {_LAST_WITH_CUDA_12}: pip install "
        f'"torch=={_LAST_WITH_CUDA_12}.*" --index-url '
        "https://download.pytorch.org/whl/cu126"
    )
