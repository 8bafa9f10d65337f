"""What budgetfit predicts for a published row."""

import warnings
from dataclasses import dataclass

from budgetfit.core.budget import plan_budget
from budgetfit.core.recipe import Recipe
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.traces.session import TraceSession
from budgetfit.utils.function_name import qualified_name
from budgetfit.workload.workload import Workload
from tests.accuracy.published.programs import Program, alternative, program
from tests.accuracy.published.rows import Row, no_prediction

ASSUMED_CARD = "rtx-3090"  # where a row states none


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row and what was predicted for it; or the reason why nothing was."""

    row: Row
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    usable_bytes: int = 0
    assumed: str = ""
    reason: str | None = None

    @property
    def bytes(self) -> int:
        """The predicted number of the row's own footprint."""
        if self.row.footprint == "allocated":
            return self.allocated_bytes
        return self.reserved_bytes + self.row.context_bytes

    @property
    def error(self) -> float | None:
        """Signed: above zero means predicted too much; None for a verdict."""
        if self.reason is not None or self.row.bytes is None:
            return None
        return self.bytes / self.row.bytes - 1

    @property
    def fits(self) -> bool:
        """Whether the plan would fit the card."""
        return self.reserved_bytes <= self.usable_bytes

    @property
    def holds(self) -> bool:
        """Within the row's tolerance, or the same verdict."""
        if self.error is None:
            return not self.fits
        return abs(self.error) <= self.row.within


def predict(row: Row, run: Program | None = None) -> Prediction:
    """Trace and replay the row's program; name the reason where there is none.

    Args:
        row: What was published.
        run: Another program than the row's own.
    """
    reason = no_prediction(row)
    if reason is not None:
        return Prediction(row=row, reason=reason)
    gpu = find_gpu(row.card or ASSUMED_CARD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' on its own names
        run = run or program(row)
        workload = Workload(
            model=run.model,
            batch=run.batch,
            gpu=gpu,
            loss=run.loss,
            optimizer=None if isinstance(run.optimizer, str) else run.optimizer,
        ).with_found_blocks()
        trace = TraceSession(workload).exact(_recipe(run, workload))
    timeline = replay(trace, run.batch_size, gpu, limit_bytes=UNLIMITED_BYTES)
    steps = [point for point in timeline.points if point.phase != "setup"]
    return Prediction(
        row=row,
        allocated_bytes=max(point.allocated_bytes for point in steps),
        reserved_bytes=max(point.reserved_bytes for point in steps),
        usable_bytes=plan_budget(gpu.total_bytes, gpu).usable_bytes,
        assumed=run.assumed,
    )


def predict_with_sentence(row: Row) -> tuple[Prediction, str]:
    """Predict a row; where it misses, also say what is known of the difference."""
    found = predict(row)
    if found.reason is not None or found.holds:
        return found, ""
    other = alternative(row)
    if other is None:
        return found, "Unexplained."
    again = predict(row, other.program)
    if again.error is None:
        result = "fits" if again.fits else "does not fit"
    else:
        result = f"is off by {again.error:+.1%}"
    because = other.because[0].upper() + other.because[1:]
    return found, f"{because} the prediction {result}."


def _recipe(run: Program, workload: Workload) -> Recipe:
    optimizer = run.optimizer
    return Recipe(
        batch_size=run.batch_size,
        gradient_accumulation_steps=run.micro_batches,
        precision=run.precision,
        optimizer=optimizer
        if isinstance(optimizer, str)
        else qualified_name(optimizer),
        segments=checkpoint_every_block(workload.blocks) if run.recompute else (),
    )
