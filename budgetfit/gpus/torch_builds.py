"""Which of PyTorch's builds have kernels for a card."""

from typing import Final

from budgetfit.gpus.table import Gpu

OLDEST_OF_CUDA_13: Final = (7, 5)  # it has no kernels for what is older
# PyTorch publishes builds for CUDA 12 up to this release (pytorch/pytorch, issue
# 190385); the one for 12.6 is the last with Maxwell, Pascal and Volta.
_LAST_WITH_CUDA_12: Final = "2.14"


def builds_note(gpu: Gpu) -> str | None:
    """Say which builds train on a card that the newest do not; None if they do."""
    if gpu.compute_capability >= OLDEST_OF_CUDA_13:
        return None
    major, minor = gpu.compute_capability
    return (
        f"{gpu.title} (capability {major}.{minor}) trains with PyTorch's builds for "
        f"CUDA 12.6 alone, the last of them torch {_LAST_WITH_CUDA_12}: pip install "
        f'"torch=={_LAST_WITH_CUDA_12}.*" --index-url '
        "https://download.pytorch.org/whl/cu126"
    )
