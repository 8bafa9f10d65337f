"""``TargetGpu``: the GPU and the memory limit to plan for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from budgetfit.calibration.known_measurements import context_for, gpu_of_device
from budgetfit.core.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from budgetfit.core.budget import Budget, plan_budget
from budgetfit.core.units import parse_bytes
from budgetfit.errors import InputError
from budgetfit.gpus.cuda_context import CudaContext
from budgetfit.gpus.table import Gpu, builds_note, find_gpu, generic_gpu
from budgetfit.inputs.allocator_settings import Given, find_allocator_settings
from budgetfit.inputs.several_gpus import parse_link
from budgetfit.measuring.process_memory import free_bytes
from budgetfit.utils.format_bytes import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGpu:
    """The GPU to plan for, a memory limit, the CUDA context, and notes on assumptions.

    ``is_here``: whether this machine has it. ``allocator``: the settings of PyTorch's.
    """

    gpu: Gpu
    total_bytes: int | None
    context: CudaContext
    notes: tuple[str, ...] = ()
    is_here: bool = False
    allocator: AllocatorSettings = DEFAULT_SETTINGS

    def budget(
        self, headroom: int | str | None, host_ram: int | str | None = None
    ) -> Budget:
        """Compute the allocator budget and the limit on pinned host memory.

        Raises:
            InputError: If an argument is not a size, or nothing is left.
        """
        headroom_bytes = None
        if headroom is not None:
            headroom_bytes = 0 if headroom in (0, "0") else parse_bytes(headroom, 0)
        total = self.gpu.total_bytes if self.total_bytes is None else self.total_bytes
        made = plan_budget(
            total, self.gpu, headroom_bytes, self.context, self.allocator
        )
        host_ram_bytes, source = self._host_ram(host_ram)
        return replace(made, host_ram_bytes=host_ram_bytes, host_ram_source=source)

    def _host_ram(self, host_ram: int | str | None) -> tuple[int, str]:
        if host_ram is not None:
            asked = 0 if host_ram in (0, "0") else parse_bytes(host_ram, 0)
            return asked, "given"
        free = free_bytes() if self.is_here else None
        if free is None:
            assumed = round(self.gpu.host_ram_gib * 2**30)
            return assumed, "assumed (host_ram=, --host-ram)"
        return free, "free on this machine"

    def on(self, gpu: Gpu) -> TargetGpu:
        """Return another GPU as target, with all of its memory."""
        context, _ = context_for(gpu)
        return TargetGpu(
            gpu=gpu, total_bytes=None, context=context, allocator=self.allocator
        )

    def connected(self, link: str | None, nodes: int) -> TargetGpu:
        """Return the target with what connects several; ``nodes`` 0: one GPU.

        Raises:
            InputError: If it is no link, or there is nothing that it connects.
        """
        gpu = replace(self.gpu, interconnect=parse_link(link, nodes))
        return replace(self, gpu=gpu)

    @property
    def context_bytes(self) -> int:
        """Bytes set aside for the CUDA context."""
        return self.context.planned_bytes


def find_target_gpu(
    vram: int | str | None, gpu: Gpu | str | None, allocator: Given = None
) -> TargetGpu:
    """Resolve ``gpu`` and ``vram`` to a GPU and a memory limit.

    Raises:
        InputError: If neither is given and this machine has no CUDA device, or the
            allocator's settings are wrong.
    """
    found, total_bytes, notes = _gpu_and_limit(vram, gpu)
    context, more = context_for(found)
    old = builds_note(found)
    is_here = torch.cuda.is_available() and current_gpu().name == found.name
    settings, said = find_allocator_settings(allocator, is_here=is_here)
    return TargetGpu(
        gpu=found,
        total_bytes=total_bytes,
        context=context,
        notes=(*notes, *more, *([old] if old else []), *said),
        is_here=is_here,
        allocator=settings,
    )


def _gpu_and_limit(
    vram: int | str | None, gpu: Gpu | str | None
) -> tuple[Gpu, int | None, tuple[str, ...]]:
    limit = None if vram is None else parse_limit(vram)
    if gpu is not None:
        if not isinstance(gpu, (str, Gpu)):
            raise InputError(
                f'gpu must be a name such as "rtx-4090", or a plan\'s gpu; got {gpu!r}.'
            )
        found = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
        if limit is not None and limit > found.total_bytes:
            have = format_bytes(found.total_bytes)
            note = (
                f"{found.title} has {have}, less than the {format_bytes(limit)} asked "
                f"for: planned for {have}"
            )
            return found, found.total_bytes, (note,)
        return found, limit, ()
    if torch.cuda.is_available():
        return current_gpu(), limit, ()
    if limit is None:
        raise InputError(
            "Say how much memory to plan for: this machine has no CUDA device. For "
            'example vram="24GB" or gpu="rtx-4090" (--vram 24GB, --gpu rtx-4090).'
        )
    found = generic_gpu(limit)
    note = f"no card named: planned for {found.title}; name yours with gpu="
    return found, limit, (note,)


def parse_limit(vram: int | str) -> int:
    """Return a memory limit in bytes.

    Raises:
        InputError: If it is no size; of a card's name, that it is one.
    """
    try:
        return parse_bytes(vram)
    except InputError as error:
        try:
            find_gpu(str(vram))
        except InputError:
            raise error from None
    raise InputError(
        f"{vram!r} is a card and no memory size: use gpu={vram!r} (--gpu {vram})."
    )


def current_gpu() -> Gpu:
    """Return the CUDA device of this machine."""
    return gpu_of_device(torch.device("cuda", torch.cuda.current_device()))
