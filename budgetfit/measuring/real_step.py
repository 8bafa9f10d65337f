"""Run real training steps and measure memory by phase, and time."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from budgetfit.core.allocator.out_of_memory_message import is_out_of_memory
from budgetfit.errors import InputError
from budgetfit.measuring.categories import gradient_bytes, model_bytes, state_bytes
from budgetfit.measuring.meters import CpuMeter, CudaMeter, Meter
from budgetfit.measuring.process_memory import ProcessMemory, resident_bytes
from budgetfit.measuring.protocols import MakeLiveBytes, MakeRun, TrainingRun

LONG_STEP_S = 10  # a first step that is said to take long
MIN_STEPS = 3  # 1 creates optimizer state, 2 has the steady peak, 3 repeats it


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPhase:
    """The memory peak of one phase, over all its micro-batches.

    ``reserved_bytes`` is -1 where nothing is reserved (on the CPU).
    """

    step: int
    phase: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSteps:
    """Measured memory and time of real training steps.

    Attributes:
        device: ``cuda`` or ``cpu``.
        device_name: As the driver reports it, or the processor.
        phases: In order; empty on a CPU without a meter.
        process_bytes: Peak device memory of this process; None on a CPU.
        last_process: Process memory after the last step; None on a CPU.
        out_of_memory: The error text if the card was too small; None otherwise.
        notes: Sources of the numbers, and what was not measured.
        counted: Bytes of parameters, buffers, gradients and optimizer state.
        shorter_batches: Number of complete steps of the shorter batches.
        shorter_reserved_bytes: The reserved peak over them; -1 without any.
        host_growth_bytes: Host memory after the last step, less before the run was
            made; None where it cannot be read.
        pinned_bytes: Peak of pinned memory; None on a CPU.
    """

    device: str
    device_name: str
    steps: int
    phases: tuple[MeasuredPhase, ...]
    process_bytes: int | None
    step_ms: tuple[float, ...]
    last_process: ProcessMemory | None = None
    out_of_memory: str | None = None
    notes: tuple[str, ...] = field(default=())
    counted: dict[str, int] = field(default_factory=dict)
    shorter_batches: int = 0
    shorter_reserved_bytes: int = -1
    host_growth_bytes: int | None = None
    pinned_bytes: int | None = None


def find_device(device: torch.device | str | None) -> torch.device:
    """Return the device to verify on: the given one, or this machine's CUDA device.

    Raises:
        InputError: If there is no CUDA device and the CPU was not requested.
    """
    chosen = torch.device(device if device is not None else "cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "There is no CUDA device here to verify on. On the machine with the card, "
            'run it again; or say device="cpu", which checks gradients and live bytes '
            "and cannot check VRAM."
        )
    return chosen


def check_steps(steps: object) -> None:
    """Refuse too few optimizer steps to measure."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < MIN_STEPS:
        raise InputError(
            f"steps must be a whole number of at least {MIN_STEPS}, got {steps!r}: the "
            "optimizer's state appears in the first one, the steady peak in the second."
        )


def run_real_steps(  # noqa: PLR0913 - one value each, all needed
    make_run: MakeRun,
    batch: object,
    *,
    steps: int = MIN_STEPS,
    micro_steps: int = 1,
    device: torch.device | str,
    live_bytes: MakeLiveBytes | None = None,
    shorter: Sequence[object] = (),
    say: Callable[[str], None] = lambda _: None,
) -> RealSteps:
    """Train for a few real optimizer steps and measure each phase.

    Memory on CUDA is what ``torch.cuda.max_memory_allocated`` and ``..._reserved``
    report for the phase, on the CPU what ``live_bytes`` counts. The run is undone at
    the end; weights stay trained (``preserved_model`` restores them).

    ``live_bytes`` starts the live-bytes counter for the CPU. ``shorter``: batches that
    run one more optimizer step each, after the others. ``say`` is called with a line of
    text after a first step of ten seconds and more.

    Raises:
        InputError: If ``steps`` is below 3.
    """
    check_steps(steps)
    device = torch.device(device)
    before = resident_bytes()
    with _meter(device, live_bytes) as meter:
        record = _Record(meter, device, say)
        batches = [*[batch] * steps, *shorter]
        error = _train(make_run, record, batches, steps, micro_steps)
        after = resident_bytes()
        return RealSteps(
            device=device.type,
            device_name=device_name(device),
            steps=len(record.step_ms),
            phases=record.phases(),
            process_bytes=meter.process_bytes,
            step_ms=tuple(record.step_ms),
            last_process=meter.last_process,
            out_of_memory=error,
            notes=tuple(meter.notes),
            counted=record.counted,
            shorter_batches=record.shorter_batches,
            shorter_reserved_bytes=record.shorter_reserved_bytes,
            host_growth_bytes=(
                after - before if after is not None and before is not None else None
            ),
            pinned_bytes=meter.pinned_bytes(),
        )


@contextmanager
def _meter(device: torch.device, live_bytes: MakeLiveBytes | None) -> Iterator[Meter]:
    """Return the meter of a device; ``live_bytes`` is for the CPU."""
    if device.type == "cuda":
        yield CudaMeter(device)
        return
    with live_bytes() if live_bytes is not None else nullcontext() as counting:
        yield CpuMeter(counting)


class _Record:
    """Records peaks and times of phases and steps."""

    def __init__(
        self, meter: Meter, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._meter = meter
        self._say = say
        self._device = device
        self._peaks: dict[tuple[int, str], tuple[int, int]] = {}
        self._phase: str | None = None
        self.step = 0
        self.step_ms: list[float] = []
        self.run: TrainingRun | None = None
        self.counted: dict[str, int] = {}
        self.is_shorter = False
        self.shorter_batches = 0
        self.shorter_reserved_bytes = -1

    def on_phase(self, phase: str) -> None:
        """End the current phase and start this one."""
        self.end_phase()
        self._phase = phase
        model = getattr(self.run, "model", None)
        if phase == "optimizer" and model is not None:
            self.counted["gradients"] = gradient_bytes(model, self._device)
        self._meter.start_phase()

    def end_phase(self) -> None:
        """Record the peak of the current phase."""
        peaks = self._meter.peaks() if self._phase is not None else None
        if self._phase is not None and peaks is not None and self.is_shorter:
            reserved = max(self.shorter_reserved_bytes, peaks[1])
            self.shorter_reserved_bytes = reserved
        elif self._phase is not None and peaks is not None:
            key = (self.step, self._phase)
            known = self._peaks.get(key, (0, -1))
            self._peaks[key] = (max(known[0], peaks[0]), max(known[1], peaks[1]))
        self._phase = None

    def finish_step(self, started: float) -> None:
        """Record the time of a complete step."""
        self.end_phase()
        self._meter.finish_step()
        if self.is_shorter:
            self.shorter_batches += 1
            return
        took = time.perf_counter() - started
        self.step_ms.append(took * 1000)
        self.step += 1
        if self.step == 1 and took >= LONG_STEP_S:
            self._say(f"the first step took {took:.0f} s, and others follow")
        model = getattr(self.run, "model", None)
        if model is not None and self.run is not None:
            self.counted |= model_bytes(model, self._device)
            optimizer = self.run.optimizer
            self.counted["optimizer_state"] = state_bytes(optimizer, self._device)

    def phases(self) -> tuple[MeasuredPhase, ...]:
        """Return all peaks in order."""
        return tuple(
            MeasuredPhase(
                step=step, phase=phase, allocated_bytes=peak, reserved_bytes=reserved
            )
            for (step, phase), (peak, reserved) in self._peaks.items()
        )


def _train(
    make_run: MakeRun,
    record: _Record,
    batches: Sequence[object],
    steps: int,
    micro_steps: int,
) -> str | None:
    """Run the steps; return the text of an out-of-memory error, which ends them.

    Batches after the first ``steps`` are shorter ones.
    """
    run: TrainingRun | None = None
    try:
        record.run = run = make_run(record.on_phase)
        for number, chosen in enumerate(batches):
            record.is_shorter = number >= steps
            started = time.perf_counter()
            for _ in range(micro_steps):
                run.step(chosen)
            record.finish_step(started)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        record.end_phase()
        # The rest is PyTorch's general advice on fragmentation.
        return str(error).split("\n", 1)[0].split(" If reserved but", 1)[0]
    finally:
        record.run = None
        if run is not None:
            run.undo()
    return None


def device_name(device: torch.device) -> str:
    """Return the card's name as the driver reports it, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return next(iter(names), platform.processor() or platform.machine())
