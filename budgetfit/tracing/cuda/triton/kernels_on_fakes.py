"""The context in which code with Triton kernels runs on fake tensors."""

import contextlib
import sys
from collections.abc import Iterator

from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.cuda.triton.device_answers import answers_for_kernels
from budgetfit.tracing.cuda.triton.launches import launches_on_fakes


def triton_is_loaded() -> bool:
    """Whether a module of this process may have Triton kernels."""
    return "triton.runtime.autotuner" in sys.modules


@contextlib.contextmanager
def kernels_on_fakes(target: CudaTarget | None) -> Iterator[None]:
    """Let kernels be launched on fake tensors, and their code see the target's GPU.

    Does nothing where Triton is not loaded, or without a target.
    """
    if target is None or not triton_is_loaded():
        yield
        return
    with answers_for_kernels(target), launches_on_fakes():
        yield
