"""The best of a few fixed policies for a model under torch.compile as a whole.

Its graph has no blocks that could be measured one by one, and a trace of it compiles
for a minute: what is tried is said, and nothing is called proven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from budgetfit.errors import InputError
from budgetfit.planning.search.policies import fixed_segments
from budgetfit.planning.search.search import SearchResult

if TYPE_CHECKING:
    from budgetfit.core.plan import Estimate
    from budgetfit.planning.session import PlanningSession

POLICIES: Final = ("none", "every-2", "full")


def search_compiled_model(session: PlanningSession) -> SearchResult:
    """Return the best policy as judged; the last one where none fits.

    The fastest is the first that fits: each recomputes more than the one before. For
    the lowest memory all are judged.

    Raises:
        InputError: Without a batch size, or for a policy that needs measured blocks.
    """
    asked, size = session.request.checkpointing, session.request.batch_size
    if size is None:
        raise InputError(
            "compile='model' compiles the model anew for each batch size, a minute for "
            "each: say which with batch_size=, or use compile='blocks'."
        )
    if asked == "sqrt":
        raise InputError(
            "checkpointing='sqrt' needs the memory of single blocks, which a compiled "
            "model does not have. Use auto, none, full, every-2 or block names."
        )
    policies = POLICIES if asked == "auto" and session.workload.blocks else (asked,)
    judged: list[Estimate] = []
    for policy in policies:
        kind = "none" if policy == "auto" else policy
        segments = fixed_segments(kind, session.workload.blocks)
        judged.append(session.judge(session.settings.recipe(size, segments)))
        if judged[-1].fits and session.request.objective != "memory":
            break
    best = session.best_fitting(judged)
    tried = ", ".join(map(str, policies[: len(judged)]))
    return SearchResult(
        session=session,
        estimate=best or judged[-1],
        explanation=f"The best of what was judged for the compiled model: {tried}",
    )
