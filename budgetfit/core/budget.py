"""Budget: how much of a card is left for PyTorch's allocator."""

from dataclasses import dataclass
from typing import Final

from budgetfit.core.byte_text import format_bytes
from budgetfit.core.errors import InputError
from budgetfit.core.gpus import Gpu

_MIB: Final = 2**20
# total_memory of one card differs by about 1 % between machines (driver, ECC,
# display), and kernels loaded after the first steps take some more;
# docs/decisions/0005-headroom-and-context.md.
_HEADROOM_PER_MILLE: Final = 10
_LEAST_HEADROOM_BYTES: Final = 128 * _MIB

# CUDA context and loaded kernels of a training process. They grow with the threads
# that a card can keep resident: fitted to 45 published reports, none of which is more
# than 70 MiB above the line. The same decision lists them.
_CONTEXT_BASE_BYTES: Final = 64 * _MIB
_CONTEXT_BYTES_PER_THREAD: Final = 2400


@dataclass(frozen=True, slots=True)
class Budget:
    """A card's memory and what of it is not for the allocator (memory-model A4).

    Attributes:
        total_bytes: The card, or the limit that was asked for.
        context_bytes: CUDA context and lazily loaded kernels: an estimate.
        headroom_bytes: Kept free on top of the predicted process.

    Raises:
        InputError: Nothing is left, or a part is negative.
    """

    total_bytes: int
    context_bytes: int
    headroom_bytes: int

    def __post_init__(self) -> None:
        if self.headroom_bytes < 0:
            raise InputError(
                f"A headroom of {format_bytes(self.headroom_bytes)} is below zero. "
                'Write 0 or a size, for example "500MB".'
            )
        if self.usable_bytes <= 0:
            raise InputError(
                f"{format_bytes(self.total_bytes)} leave nothing to plan with: the "
                f"CUDA context takes about {format_bytes(self.context_bytes)} and "
                f"the headroom {format_bytes(self.headroom_bytes)}. Give more memory"
                ', for example vram="8GB", or less headroom.'
            )

    @property
    def usable_bytes(self) -> int:
        """Bytes that the allocator may reserve."""
        return self.total_bytes - self.context_bytes - self.headroom_bytes


def plan_budget(
    total_bytes: int, gpu: Gpu, headroom_bytes: int | None = None
) -> Budget:
    """Return the budget of a card or of a limit on it.

    Args:
        total_bytes: Bytes of device memory that the process may take.
        gpu: The card, which decides the size of the CUDA context.
        headroom_bytes: Kept free; None for 1 % of the total, at least 128 MiB.

    Raises:
        InputError: Nothing is left after context and headroom.
    """
    if headroom_bytes is None:
        headroom_bytes = max(
            total_bytes * _HEADROOM_PER_MILLE // 1000, _LEAST_HEADROOM_BYTES
        )
    return Budget(
        total_bytes=total_bytes,
        context_bytes=context_bytes(gpu),
        headroom_bytes=headroom_bytes,
    )


def context_bytes(gpu: Gpu) -> int:
    """Return an estimate of what a training process takes outside the allocator.

    CUDA context and lazily loaded kernels (memory-model A3); the first ``verify`` on a
    machine measures it. NCCL and CUDA graphs are not in it.
    """
    resident_threads = gpu.sm_count * gpu.threads_per_sm
    return _CONTEXT_BASE_BYTES + _CONTEXT_BYTES_PER_THREAD * resident_threads
