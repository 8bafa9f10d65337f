"""Verification: measured against predicted memory and time of real steps."""

from dataclasses import dataclass
from typing import Final

from budgetfit.utils.lazy_import import lazy_import

# A note of verifications on a CPU, where compiled code is other code.
WITHOUT_COMPILE: Final = (
    "the steps ran without torch.compile: what it does to memory, time and gradients "
    "is verified on a GPU only"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCheck:
    """One phase, predicted against measured; bytes, -1 where not measured."""

    step: int
    phase: str
    predicted_allocated_bytes: int
    measured_allocated_bytes: int
    predicted_reserved_bytes: int
    measured_reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryCheck:
    """Bytes of one category at the peak, predicted against measured."""

    name: str
    predicted_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Measurements of real training steps against the prediction.

    Attributes:
        device: ``cuda`` or ``cpu``; on the CPU, live bytes are compared under CPU
            semantics and VRAM is not checked.
        device_name: As the driver reports it, or the processor.
        steps: Real optimizer steps that ran.
        phases: Predicted against measured, per step and phase.
        predicted_process_bytes, measured_process_bytes: What nvidia-smi shows; None
            where it cannot be read.
        predicted_process_range_bytes: 95 % interval of the predicted process.
        measured_context_bytes: The process less the allocator's reserved bytes, after
            the last step; None where it cannot be read.
        step_ms: Median of the measured steps after the first.
        first_step_ms: The first step, which allocates the optimizer state and loads
            kernels; None if it did not end.
        predicted_step_ms: The plan's, times ``time_factor``.
        time_factor: What the plan multiplied predicted times by.
        gradients_match: Whether gradients equal the unmodified model's; None if not
            compared.
        max_gradient_error: Largest relative difference (norm of the difference over
            norm).
        gradient_noise: The same between two runs of the unmodified model with equal
            seeds, where it is too large for a comparison, or NaN where no gradient is
            finite; None otherwise.
        recomputed_blocks: How many blocks ran their forward twice; those that save
            nothing, and need not, are counted as planned.
        out_of_memory: The CUDA error text when the plan did not fit; None otherwise.
        notes: What was not checked.
        categories: At the peak; parameters, gradients and optimizer state are measured
            on the tensors themselves, the rest is one row.
        usable_bytes: Limit on reserved bytes by the plan's budget; None where VRAM was
            not checked.
        room_bytes: ``usable_bytes`` plus the headroom: above it the GPU is full.
        predicted_pinned_bytes, measured_pinned_bytes: Page-locked host memory; None
            where it cannot be read.
        host_growth_bytes: How much more host memory the process held at the end than
            before the first step; None where it cannot be read.
        shorter_batches: How many other batches ran a step after the longest.
        shorter_reserved_bytes: The reserved peak over those steps; -1 without any.
        fresh_process: Whether the steps ran in a subprocess.
        ranks: GPUs that trained together: of each measurement the largest of all.
    """

    device: str
    device_name: str
    steps: int
    phases: tuple[PhaseCheck, ...]
    predicted_process_bytes: int | None
    measured_process_bytes: int | None
    step_ms: float
    predicted_step_ms: float
    gradients_match: bool | None
    max_gradient_error: float | None
    recomputed_blocks: int
    expected_recomputed_blocks: int
    out_of_memory: str | None = None
    notes: tuple[str, ...] = ()
    predicted_process_range_bytes: tuple[int, int] | None = None
    measured_context_bytes: int | None = None
    time_factor: float = 1.0
    first_step_ms: float | None = None
    categories: tuple[CategoryCheck, ...] = ()
    usable_bytes: int | None = None
    room_bytes: int | None = None
    predicted_pinned_bytes: int = 0
    measured_pinned_bytes: int | None = None
    host_growth_bytes: int | None = None
    shorter_batches: int = 0
    shorter_reserved_bytes: int = -1
    fresh_process: bool = False
    ranks: int = 1
    gradient_noise: float | None = None

    def __str__(self) -> str:
        reports = lazy_import("budgetfit.reporting.render")
        text = reports.verification_text(self)
        return str(reports.render(text, width=reports.WIDE))

    @property
    def allocated_error(self) -> float | None:
        """Signed relative error of the allocated peak; None if not measured."""
        measured = max(
            (row.measured_allocated_bytes for row in self.phases), default=-1
        )
        if measured <= 0:
            return None
        predicted = max(row.predicted_allocated_bytes for row in self.phases)
        return predicted / measured - 1

    @property
    def measured_reserved_bytes(self) -> int:
        """Peak reserved bytes over all steps; -1 if not measured."""
        reserved = [row.measured_reserved_bytes for row in self.phases]
        return max((*reserved, self.shorter_reserved_bytes), default=-1)

    @property
    def fits(self) -> bool | None:
        """Whether the steps fit on the planned GPU; None if VRAM was not checked.

        The headroom may be used: it covers prediction errors.
        """
        if self.out_of_memory is not None:
            return False
        if self.room_bytes is None or self.measured_reserved_bytes < 0:
            return None
        return self.measured_reserved_bytes <= self.room_bytes

    @property
    def passed(self) -> bool:
        """Whether it fits, gradients are equal, and recomputation is as planned.

        False where the model's gradients are too noisy for a comparison.
        """
        return (
            self.fits is not False
            and self.gradient_noise is None
            and self.gradients_match is not False
            and self.recomputed_as_planned is not False
        )

    @property
    def recomputed_as_planned(self) -> bool | None:
        """Whether the planned blocks ran again; None if gradients were not compared."""
        if self.gradients_match is None and self.gradient_noise is None:
            return None
        return self.recomputed_blocks == self.expected_recomputed_blocks
