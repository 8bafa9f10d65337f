"""What budgetfit predicts for a run on a real card."""

from dataclasses import dataclass
from functools import cache

from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.traces.quantized_loading import Loading
from tests.accuracy.real_cards.program import trace_run, trace_steps
from tests.accuracy.real_cards.runs import MIB, CardRun

GPU = "t4"
PHASES = ("forward", "backward", "optimizer")
# Entries of the checkpoint that threads copy ahead of their turn; at most all of them.
AHEAD = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 10_000)


@dataclass(frozen=True)
class Compared:
    """A run, and the peaks predicted for it in MiB.

    ``threads_mib``: reserved after loading with each lead of ``AHEAD``, if asked for.
    """

    run: CardRun
    allocated_mib: float
    reserved_mib: float
    phases_mib: tuple[float, ...]
    threads_mib: tuple[float, ...] = ()

    @property
    def allocated_error(self) -> float:
        """Signed: above zero means predicted too much."""
        return self.allocated_mib / self.run.allocated_mib - 1

    @property
    def reserved_error(self) -> float:
        """Signed: above zero means predicted too much."""
        return self.reserved_mib / self.run.reserved_mib - 1

    @property
    def threads_explain(self) -> bool:
        """Whether what was reserved is between the least and the most with threads."""
        return min(self.threads_mib) <= self.run.reserved_mib <= max(self.threads_mib)

    @property
    def phase_errors(self) -> tuple[float, ...]:
        """Signed errors of the peaks of allocated memory in each of ``PHASES``."""
        measured = [getattr(self.run, f"{phase}_mib") for phase in PHASES]
        pairs = zip(self.phases_mib, measured, strict=True)
        return tuple(predicted / found - 1 for predicted, found in pairs)


def compare(run: CardRun, *, threads: bool = False) -> Compared:
    """Predict a run by tracing its program; what was measured is not looked at.

    ``threads``: a base in nf4 is also loaded as the libraries of that time did.
    """
    timeline = _timeline(run)
    last = timeline.points[-1].step
    steps = [point for point in timeline.points if point.phase in PHASES]
    return Compared(
        run=run,
        allocated_mib=max(point.allocated_bytes for point in steps) / MIB,
        reserved_mib=timeline.reserved_bytes / MIB,
        phases_mib=tuple(
            max(
                point.allocated_bytes
                for point in steps
                if point.phase == phase and point.step == last
            )
            / MIB
            for phase in PHASES
        ),
        threads_mib=reserved_with_threads(run) if threads and run.quantization else (),
    )


def reserved_with_threads(
    run: CardRun, leads: tuple[int, ...] = AHEAD, *, empties: bool = False
) -> tuple[float, ...]:
    """Predict what is reserved, in MiB, with each lead of the threads that load.

    ``empties``: as in ``Loading``; peft before 0.20 does not.
    """
    steps, model = trace_steps(run)
    loaded = (Loading(model, ahead=x, empties=empties).before(steps) for x in leads)
    return tuple(
        replay(
            trace, run.batch_size, find_gpu(GPU), limit_bytes=UNLIMITED_BYTES
        ).reserved_bytes
        / MIB
        for trace in loaded
    )


@cache
def _timeline(run: CardRun) -> MemoryTimeline:
    return replay(
        trace_run(run), run.batch_size, find_gpu(GPU), limit_bytes=UNLIMITED_BYTES
    )
