"""Search once more in a smaller budget: for settings that need less memory."""

from dataclasses import replace
from typing import Final

from budgetfit.core.plan import Estimate
from budgetfit.planning.search.loss_chunking import (
    better_without_host,
    search_with_loss_chunks,
)
from budgetfit.planning.session import PlanningSession

MOST_SEARCHES: Final = 3  # in ever smaller budgets
ROUNDS: Final = 4  # of each
_LEAST_EXCESS_BYTES: Final = 8 << 20


def with_less_memory(
    session: PlanningSession, known: Estimate, excess_bytes: int
) -> tuple[PlanningSession, PlanningSession, Estimate] | None:
    """Search for settings that need less than known ones by an excess, or by 8 MiB.

    Less than what ``known`` reserves: that may be far below the budget, in which a
    search would find the same settings again.

    Returns:
        The session with the smaller budget, the session that found the settings (its
        loss may be chunked), and their estimate; None where nothing is left, or found.
    """
    budget, excess = session.budget, max(excess_bytes, _LEAST_EXCESS_BYTES)
    unused = max(budget.usable_bytes - known.reserved_bytes, 0)
    if budget.usable_bytes <= unused + excess:
        return None
    budget = replace(budget, headroom_bytes=budget.headroom_bytes + unused + excess)
    smaller = session.asking(budget=budget)
    found = better_without_host(
        search_with_loss_chunks(smaller, max_rounds=ROUNDS), ROUNDS
    )
    if found.estimate is None:
        return None
    return smaller, found.session, found.estimate
