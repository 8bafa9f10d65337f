"""CardRow: what one card makes of a model, for the question which card is needed."""

from __future__ import annotations

from dataclasses import dataclass

from budgetfit.core.adapter import FULL
from budgetfit.core.budget import Budget
from budgetfit.core.plan import Estimate
from budgetfit.gpus.table import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRow:
    """One card of a comparison.

    Attributes:
        gpu, budget: The card and what of it is usable.
        estimate: The best settings there; where nothing fits, those that need least;
            None where the card cannot run what was asked for.
        problem: Why it cannot; empty otherwise.
        blocks: Blocks of the model that could be recomputed.
        warnings: What was done otherwise than asked.
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
        """Whether the judge let the settings pass on this card."""
        return self.estimate is not None and bool(self.estimate.fits)
