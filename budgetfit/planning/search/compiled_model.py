"""The best of a few fixed policies for a model under torch.compile as a whole.

Its graph has no blocks that could be measured one by one, and a trace of it compiles
for a minute at each batch size: few are tried, what is tried is said, and nothing is
called proven.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.planning.search.policies import fixed_segments
from budgetfit.planning.search.search import SearchResult
from budgetfit.planning.session import PlanningSession
from budgetfit.solvers.batch_size_grid import LARGEST_TRACED_SIZE, batch_size_grid

POLICIES: Final = ("none", "every-2", "full")
FIRST_SIZE: Final = 8
SIZES_JUDGED: Final = 5  # of each policy, at most


def search_compiled_model(session: PlanningSession) -> SearchResult:
    """Return the best policy and batch size as judged; the last one where none fits.

    Each policy recomputes more than the one before. The next is judged where this one
    does not fit at the largest size; and for the lowest memory all are.

    Raises:
        InputError: For a policy that needs measured blocks.
    """
    asked, objective = session.request.checkpointing, session.request.objective
    if asked == "sqrt":
        raise InputError(
            "checkpointing='sqrt' needs the memory of single blocks, which a compiled "
            "model does not have. Use auto, none, full, every-2 or block names."
        )
    policies = POLICIES if asked == "auto" and session.workload.blocks else (asked,)
    sizes = _batch_sizes(session)
    judged: list[Estimate] = []
    best: Estimate | None = None
    for policy in policies:
        kind = "none" if policy == "auto" else policy
        segments = fixed_segments(kind, session.workload.blocks)
        judge = partial(_judge, session, segments)
        found = judge_sizes(judge, sizes, session.budget.usable_bytes)
        judged += found
        before, best = best, session.best_fitting(judged)
        if best is None or objective == "memory":
            continue
        if best is before or best.recipe.batch_size == sizes[-1]:
            break
    tried = ", ".join(
        f"{each.recipe.batch_size} x {len(each.recipe.wrapped_blocks)}"
        for each in judged
    )
    return SearchResult(
        session=session,
        estimate=best or judged[-1],
        explanation="The best of what was judged for the compiled model (batch size x "
        f"recomputed blocks): {tried}",
    )


def _batch_sizes(session: PlanningSession) -> Sequence[int]:
    """Return the sizes of a micro-batch to choose from, in ascending order."""
    size, total = session.request.batch_size, session.settings.effective_batch_size
    if size is not None:
        return [size]
    if session.request.objective == "memory":
        return [1]
    if total is not None:
        most = min(total, LARGEST_TRACED_SIZE)
        return [each for each in range(1, most + 1) if total % each == 0]
    return batch_size_grid(LARGEST_TRACED_SIZE)


def _judge(
    session: PlanningSession, segments: tuple[Segment, ...], size: int
) -> Estimate:
    return session.judge(session.settings.recipe(size, segments))


def judge_sizes(
    judge: Callable[[int], Estimate], sizes: Sequence[int], usable_bytes: int
) -> list[Estimate]:
    """Judge a few sizes, each a better guess of the largest that fits."""
    # A guess lies on the line through the last two points of batch size and reserved
    # bytes; the first is what a batch of no sample would take. The smallest size is
    # judged before it is said that none fits.
    points: list[tuple[int, int]] = []
    judged: list[Estimate] = []
    fitting, failing = -1, len(sizes)
    at = max(0, bisect_right(sizes, FIRST_SIZE) - 1)
    while failing - fitting > 1 and (len(judged) < SIZES_JUDGED or fitting < 0):
        estimate = judge(sizes[at])
        judged.append(estimate)
        if estimate.fits:
            fitting = at
        else:
            failing = at
        points = points or [(0, estimate.batch_independent_bytes)]
        points.append((sizes[at], estimate.reserved_bytes))
        guess = bisect_right(sizes, _size_of(usable_bytes, *points[-2:])) - 1
        if 0 <= fitting >= guess:
            break
        if len(judged) >= SIZES_JUDGED:
            guess = 0  # only where nothing fits
        at = min(max(guess, fitting + 1), failing - 1)
    return judged


def _size_of(
    usable_bytes: int, first: tuple[int, int], second: tuple[int, int]
) -> float:
    """Return the batch size that takes so many bytes, on a line through two points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    if slope <= 0:  # the cache is fuller at the smaller size
        return 2.0 * max(first[0], second[0])
    return second[0] + (usable_bytes - second[1]) / slope
