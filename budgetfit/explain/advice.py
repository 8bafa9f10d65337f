"""Advice after an out-of-memory error, most helpful first."""

from collections.abc import Iterator
from typing import Final

from budgetfit.core.out_of_memory_message import OutOfMemoryMessage
from budgetfit.explain.cause import Diagnosis
from budgetfit.explain.explanation import Advice
from budgetfit.explain.failed_phase import FailedPhase
from budgetfit.explain.memory_breakdown import MemoryBreakdown
from budgetfit.explain.phase_advice import phase_advice
from budgetfit.utils.format_bytes import format_bytes

_NOTABLE_BYTES: Final = 128 * 2**20
_LISTED: Final = 4
_BARE_CONTEXT_BYTES: Final = 2**30
# torch before 2.9 reads this name only; later versions read it first.
_EXPANDABLE: Final = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
# Expandable segments do not exist on Windows.
_ON_WINDOWS: Final = "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"


def find_advice(
    message: OutOfMemoryMessage,
    parts: MemoryBreakdown,
    where: FailedPhase,
    blame: Diagnosis,
) -> tuple[Advice, ...]:
    """Return advice: changes that suffice first, then changes to the model."""
    if message.kind == "host":
        return tuple(_host())
    if message.kind != "allocator":
        return (*_outside(), *phase_advice(message, where))
    special = tuple(_special(blame))
    around = tuple(_around(message, parts, where, blame))
    first = tuple(advice for advice in around if advice.enough)
    last = tuple(advice for advice in around if not advice.enough)
    return (*special, *first, *phase_advice(message, where), *last)


def _around(
    message: OutOfMemoryMessage,
    parts: MemoryBreakdown,
    where: FailedPhase,
    blame: Diagnosis,
) -> Iterator[Advice]:
    """Yield advice that does not concern the model."""
    missing = blame.missing_bytes
    monitor = "rocm-smi --showpids" if message.on_amd else "nvidia-smi"
    idle = message.idle_bytes or 0
    if idle >= _NOTABLE_BYTES:
        yield Advice(
            text="Let segments grow, so that less is reserved and in no tensor "
            f"(at most {format_bytes(idle)}).",
            commands=(_ON_WINDOWS,) if where.on_windows else (_EXPANDABLE,),
            gain_bytes=idle,
            enough=blame.cause == "fragmentation",
        )
    named = sum(size_bytes for _, size_bytes in parts.others)
    if named >= _NOTABLE_BYTES:
        pids = [str(pid) for pid, _ in parts.others]
        yield Advice(
            text=f"{_processes(parts.others)} See what that is and end it, or take "
            "another card.",
            commands=(f"ps -fp {','.join(pids[:_LISTED])}", monitor),
            gain_bytes=named,
            enough=missing is not None and 0 < missing <= named,
        )
    if parts.unnamed_bytes >= _NOTABLE_BYTES:
        yield Advice(
            text=f"About {format_bytes(parts.unnamed_bytes)} are held by processes "
            "that the message does not name.",
            commands=(monitor,),
            gain_bytes=parts.unnamed_bytes,
            enough=missing is not None and 0 < missing <= parts.unnamed_bytes,
        )
    if message.allowed_bytes is not None and message.total_bytes is not None:
        yield Advice(
            text=f"Raise the process's limit of {format_bytes(message.allowed_bytes)}: "
            "it is set by torch.cuda.set_per_process_memory_fraction, or by "
            "per_process_memory_fraction in PYTORCH_ALLOC_CONF.",
            commands=("torch.cuda.set_per_process_memory_fraction(1.0)",),
            gain_bytes=max(0, message.total_bytes - message.allowed_bytes),
            enough=blame.cause == "limit of the process",
        )


def _processes(others: tuple[tuple[int, int], ...]) -> str:
    """Advise on other processes; several bare CUDA contexts are a launch error."""
    held = ", ".join(f"{pid} ({format_bytes(size)})" for pid, size in others[:_LISTED])
    more = len(others) - _LISTED
    text = f"Process{'es' if len(others) > 1 else ''} {held}"
    text += f" and {more} more" if more > 0 else ""
    text += f" hold{'' if len(others) > 1 else 's'} some of the card."
    if len(others) > 1 and all(size < _BARE_CONTEXT_BYTES for _, size in others):
        text += (
            " So little each is a bare CUDA context: ranks of one program, before "
            "torch.cuda.set_device(local_rank), all open the first card."
        )
    return text


def _special(blame: Diagnosis) -> Iterator[Advice]:
    if blame.cause == "one tensor larger than the card":
        yield Advice(
            text="Look at the line that asked for it: a sequence or an image that is "
            "far too long, attention without a fused kernel (its scores grow with the "
            "square of the length), or a shape that was computed wrongly.",
        )
    if blame.cause == "driver pages to host memory":
        yield Advice(
            text="Keep the driver from it, so that training fails at once and not "
            "slowly: NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem Fallback "
            "Policy, Prefer No Sysmem Fallback.",
        )
    if blame.cause == "more free than asked for":
        yield Advice(
            text="Watch the card while the program starts; on Windows, enlarge the "
            "page file, which the driver needs for every byte of the card.",
            commands=("nvidia-smi -l 1",),
        )


def _outside() -> Iterator[Advice]:
    yield Advice(
        text="Leave the driver and its libraries some room: PyTorch may have reserved "
        "the whole card. Take a limit for its allocator, or a smaller batch.",
        commands=("torch.cuda.set_per_process_memory_fraction(0.95)",),
    )
    yield Advice(
        text="See whether another process has the card.", commands=("nvidia-smi",)
    )


def _host() -> Iterator[Advice]:
    yield Advice(
        text="Hold less in host memory: fewer data loader workers, no second copy of "
        "the weights while they are loaded, no optimizer state that is offloaded.",
        commands=(
            "DataLoader(..., num_workers=2)",
            'torch.load(path, map_location="cpu", mmap=True)',
        ),
    )
    yield Advice(text="See what takes it.", commands=("free -g",))
