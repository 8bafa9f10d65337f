"""Budget: how much GPU memory is left for PyTorch's caching allocator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from budgetfit.core.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from budgetfit.errors import InputError
from budgetfit.gpus.cuda_context import CudaContext, estimated_context
from budgetfit.gpus.nccl_memory import NcclMemory
from budgetfit.gpus.table import Gpu
from budgetfit.utils.format_bytes import format_bytes

_MIB: Final = 2**20
# total_memory of one GPU model differs by about 1 % between machines (driver, ECC,
# display), and kernels loaded after the first steps take some more;
# docs/decisions/0005-headroom-and-context.md.
_HEADROOM_PER_MILLE: Final = 10
_LEAST_HEADROOM_BYTES: Final = 128 * _MIB


@dataclass(frozen=True, slots=True)
class Budget:
    """GPU memory, less the CUDA context and headroom, is what the allocator may use.

    Attributes:
        total_bytes: Of the GPU, or the requested limit.
        context_bytes: Set aside for the CUDA context and lazily loaded kernels.
        headroom_bytes: Kept free on top of the predicted process.
        context: Source and range of ``context_bytes``.
        host_ram_bytes: Limit on host memory; None: no limit.
        host_ram_source: Where that limit is from, for reports.
        allocator: Settings of PyTorch's caching allocator.
        allowed_bytes: What the allocator may reserve by its
            ``per_process_memory_fraction``; None: no limit.
        nccl: NCCL's memory, on several GPUs; its upper end is set aside.

    Raises:
        InputError: Nothing is left, or a part is negative.
    """

    total_bytes: int
    context_bytes: int
    headroom_bytes: int
    context: CudaContext | None = None
    host_ram_bytes: int | None = None
    host_ram_source: str = ""
    allocator: AllocatorSettings = DEFAULT_SETTINGS
    allowed_bytes: int | None = None
    nccl: NcclMemory | None = None

    def __post_init__(self) -> None:
        if self.headroom_bytes < 0:
            raise InputError(
                f"A headroom of {format_bytes(self.headroom_bytes)} is below zero. "
                'Write 0 or a size, for example "500MB".'
            )
        if self.usable_bytes <= 0:
            high = self.nccl.high_bytes if self.nccl is not None else 0
            nccl = f", NCCL up to {format_bytes(high)}" if high else ""
            raise InputError(
                f"{format_bytes(self.total_bytes)} leave nothing to plan with: the "
                f"CUDA context takes about {format_bytes(self.context_bytes)}{nccl} "
                f"and the headroom {format_bytes(self.headroom_bytes)}. Give more "
                'memory, for example vram="8GB", or less headroom.'
            )

    @property
    def usable_bytes(self) -> int:
        """Bytes that the allocator may reserve."""
        left = self.total_bytes - self.context_bytes - self.headroom_bytes
        left -= self.nccl.high_bytes if self.nccl is not None else 0
        return left if self.allowed_bytes is None else min(left, self.allowed_bytes)

    def with_expandable_segments(self) -> Budget:
        """Return the budget of an allocator that makes expandable segments."""
        return replace(self, allocator=self.allocator.with_expandable_segments())

    def process_range(self, reserved_bytes: int) -> tuple[tuple[int, int] | None, str]:
        """Return the range that ``nvidia-smi`` shows, and its source; None without one.

        ``reserved_bytes``: of PyTorch's caching allocator.
        """
        if self.context is None:
            return None, ""
        low, high = self.context.low_bytes, self.context.high_bytes
        source = f"process = reserved + the CUDA context, {self.context.source}"
        if self.nccl is not None:
            low, high = low + self.nccl.low_bytes, high + self.nccl.high_bytes
            source = f"{source}; + {self.nccl.source}"
        return (reserved_bytes + low, reserved_bytes + high), source

    def holds(self, reserved_bytes: int, host_bytes: int) -> bool:
        """Return whether this much device memory and host memory fits."""
        host_ram = self.host_ram_bytes
        return reserved_bytes <= self.usable_bytes and (
            host_ram is None or host_bytes <= host_ram
        )


def plan_budget(
    total_bytes: int,
    gpu: Gpu,
    headroom_bytes: int | None = None,
    context: CudaContext | None = None,
    allocator: AllocatorSettings = DEFAULT_SETTINGS,
) -> Budget:
    """Compute the allocator budget of a GPU or of a limit on it.

    Args:
        total_bytes: Device memory that the process may take.
        gpu: Decides the size of the CUDA context.
        headroom_bytes: Kept free; None for 1 % of the total, at least 128 MiB.
        context: Size of the CUDA context; None: estimated from published reports.
        allocator: Settings of PyTorch's caching allocator.

    Raises:
        InputError: Nothing is left after context and headroom.
    """
    if headroom_bytes is None:
        headroom_bytes = max(
            total_bytes * _HEADROOM_PER_MILLE // 1000, _LEAST_HEADROOM_BYTES
        )
    context = context or estimated_context(gpu)
    return Budget(
        total_bytes=total_bytes,
        context_bytes=context.planned_bytes,
        headroom_bytes=headroom_bytes,
        context=context,
        allocator=allocator,
        allowed_bytes=None
        if allocator.per_process_memory_fraction == 1
        else allocator.allowed_bytes(gpu.total_bytes),
    )
