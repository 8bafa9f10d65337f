"""The best of a few fixed policies for a model under torch.compile as a whole.

Its graph has no blocks that could be measured one by one, and a trace of it compiles
for a minute at each batch size: few are tried, what is tried is said, and nothing is
called proven. Which size comes first is known from models of a few blocks, which
compile in seconds, and from the model without torch.compile.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError, TraceError
from budgetfit.planning.search.policies import fixed_segments
from budgetfit.planning.search.search import SearchResult
from budgetfit.planning.session import PlanningSession
from budgetfit.solvers.batch_size_grid import LARGEST_TRACED_SIZE, batch_size_grid

POLICIES: Final = ("none", "every-2", "full")
FIRST_SIZE: Final = 8
SIZES_JUDGED: Final = 5  # of each policy, at most
TOLERANCE: Final = 0.02  # of what shortened models say

Point: TypeAlias = tuple[int, int]  # a batch size, and the bytes that it takes


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
        if best and not _may_be_better(session, segments, best):
            continue
        line = _expected(session, segments, sizes)
        usable_bytes = session.budget.usable_bytes
        if line and policy != policies[-1] and not _may_fit(line, sizes, usable_bytes):
            continue
        judge = partial(_judge, session, segments)
        found = judge_sizes(judge, sizes, usable_bytes, line)
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


def _may_be_better(
    session: PlanningSession, segments: tuple[Segment, ...], best: Estimate
) -> bool:
    """Whether more samples in a batch can make up for what is recomputed."""
    # By the times of the model without torch.compile: a further sample takes at least
    # as long as one of the best.
    if session.request.objective != "throughput":
        return True
    eager, size = session.changed(compile="none"), best.recipe.batch_size
    try:
        now = _judge(eager, best.recipe.segments, size)
        one, other = (_judge(eager, segments, n) for n in (size, 2 * size))
    except TraceError:
        return True
    return _micro_batch_ms(other) - _micro_batch_ms(one) < _micro_batch_ms(now)


def _micro_batch_ms(estimate: Estimate) -> float:
    steps = estimate.recipe.gradient_accumulation_steps
    return (estimate.step_ms - estimate.optimizer_ms) / steps


def _expected(
    session: PlanningSession, segments: tuple[Segment, ...], sizes: Sequence[int]
) -> list[Point]:
    """Return what the model should take with no sample and with a few.

    None where one size is asked for, or no shortened model tells.
    """
    size = sizes[_first(sizes)]
    recipe = session.settings.recipe(size, segments)
    if len(sizes) == 1 or (shortened := session.traces.shortened(recipe)) is None:
        return []
    *traces, lacking = shortened
    few, more = (session.judge(recipe, trace) for trace in traces)
    period_bytes = more.allocated_bytes - few.allocated_bytes
    # Pieces that stay reserved are mostly of what is outside of the blocks.
    pieces = min(x.reserved_bytes - x.allocated_bytes for x in (few, more))
    # Without samples it takes what the model does without torch.compile.
    eager = session.changed(compile="none")
    try:
        one, other = (
            _judge(eager, segments, n).allocated_bytes for n in (size, 2 * size)
        )
    except TraceError:
        return []
    expected = more.allocated_bytes + lacking * period_bytes + pieces
    return [(0, 2 * one - other), (size, expected)]


def _may_fit(line: list[Point], sizes: Sequence[int], usable_bytes: int) -> bool:
    """Whether the smallest size may fit; the line may be wrong by ``TOLERANCE``."""
    return _size_of(round(usable_bytes * (1 + TOLERANCE)), *line) >= sizes[0]


def _first(sizes: Sequence[int]) -> int:
    return max(0, bisect_right(sizes, FIRST_SIZE) - 1)


def judge_sizes(
    judge: Callable[[int], Estimate],
    sizes: Sequence[int],
    usable_bytes: int,
    line: Sequence[Point] = (),
) -> list[Estimate]:
    """Judge a few sizes, each a better guess of the largest that fits.

    ``line``: what no sample and a few are expected to take, for the first guess.
    """
    # A guess lies on the line through the last two points of batch size and reserved
    # bytes; the first is what a batch of no sample would take. The smallest size is
    # judged before it is said that none fits.
    points = list(line[:1])
    judged: list[Estimate] = []
    fitting, failing = -1, len(sizes)
    at = _first(sizes)
    if line:
        at = max(0, bisect_right(sizes, _size_of(usable_bytes, *line)) - 1)
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


def _size_of(usable_bytes: int, first: Point, second: Point) -> float:
    """Return the batch size that takes so many bytes, on a line through two points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    if slope <= 0:  # the cache is fuller at the smaller size
        return 2.0 * max(first[0], second[0])
    return second[0] + (usable_bytes - second[1]) / slope
