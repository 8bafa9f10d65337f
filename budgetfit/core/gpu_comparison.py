"""GpuComparison: the best settings on one GPU, a row of ``budgetfit compare``."""

from __future__ import annotations

from dataclasses import dataclass

from budgetfit.core.adapter import FULL
from budgetfit.core.budget import Budget
from budgetfit.core.plan import Estimate
from budgetfit.gpus.table import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuComparison:
    """The best settings for a model on one GPU, by one training method.

    Attributes:
        gpu, budget: The GPU and its usable memory.
        estimate: The best settings; where nothing fits, those with the lowest peak;
            None where the GPU cannot run the requested precision.
        problem: Why it cannot; empty otherwise.
        blocks: Number of blocks that can be checkpointed.
        warnings: Deviations from the request.
        method: ``full``, ``lora`` or ``qlora``: what is trained.
    """

    gpu: Gpu
    budget: Budget
    estimate: Estimate | None
    problem: str = ""
    blocks: int = 0
    warnings: tuple[str, ...] = ()
    method: str = FULL

    @property
    def fits(self) -> bool:
        """Whether the judged peak fits this GPU."""
        return self.estimate is not None and bool(self.estimate.fits)
