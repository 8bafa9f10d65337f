"""What budgetfit predicts for a run on a real card."""

from dataclasses import dataclass
from functools import cache

from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from tests.accuracy.real_cards.program import trace_run
from tests.accuracy.real_cards.runs import MIB, CardRun

GPU = "t4"
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Compared:
    """A run, and the peaks predicted for it in MiB."""

    run: CardRun
    allocated_mib: float
    reserved_mib: float
    phases_mib: tuple[float, ...]

    @property
    def allocated_error(self) -> float:
        """Signed: above zero means predicted too much."""
        return self.allocated_mib / self.run.allocated_mib - 1

    @property
    def reserved_error(self) -> float:
        """Signed: above zero means predicted too much."""
        return self.reserved_mib / self.run.reserved_mib - 1

    @property
    def phase_errors(self) -> tuple[float, ...]:
        """Signed errors of the peaks of allocated memory in each of ``PHASES``."""
        measured = [getattr(self.run, f"{phase}_mib") for phase in PHASES]
        pairs = zip(self.phases_mib, measured, strict=True)
        return tuple(predicted / found - 1 for predicted, found in pairs)


def compare(run: CardRun) -> Compared:
    """Predict a run by tracing its program; what was measured is not looked at."""
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
    )


@cache
def _timeline(run: CardRun) -> MemoryTimeline:
    return replay(
        trace_run(run), run.batch_size, find_gpu(GPU), limit_bytes=UNLIMITED_BYTES
    )
