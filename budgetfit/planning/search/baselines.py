"""Baselines: common checkpointing policies, each at its best batch size.

The chain formula leaves a margin, which would make baselines look worse than they are.
Fixed segments are one program, traced once for all batch sizes, so that each batch size
can be replayed instead.
"""

import contextlib
import sys
from bisect import bisect_left
from dataclasses import replace
from functools import partial
from typing import Final

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Segment
from budgetfit.errors import TraceError
from budgetfit.memory.chain.live_bytes import LiveBytes
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.memory.replay import device_properties, replay
from budgetfit.planning.judge import step_time
from budgetfit.planning.search.policies import EVERY_N_POLICY, policy_segments
from budgetfit.planning.search.search import best_batch, can_gain, search
from budgetfit.planning.session import PlanningSession
from budgetfit.solvers.batch_size_grid import (
    batch_size_grid,
    bisect,
    fitting_below,
    largest_fitting_batch,
)
from budgetfit.solvers.problem import Problem, Solution
from budgetfit.timing.kernel_times import StepTime
from budgetfit.traces.tracer import TRACED_BATCH_SIZES

BASELINES: Final = (
    ("everything kept", "none"),
    ("every block recomputed", "full"),
    ("Chen's sqrt(n) segments", "sqrt"),
)
EVERY_NTH: Final = ("every n-th block recomputed", EVERY_N_POLICY)  # shown only
MAX_REFUSALS: Final = 3  # batch sizes that the judge may refuse
FORMULA_EXCESS: Final = 0.02  # of a peak by formula above allocated bytes, at most
_NOTHING: Final = BlockOption(
    mode="keep", saved_bytes=0, forward_bytes=0, backward_bytes=0
)


def best_with_policy(
    session: PlanningSession, policy: str | tuple[str, ...]
) -> Estimate:
    """Return a checkpointing policy at its best batch size, or at the smallest.

    The smallest where none fits. The loss is not chunked. The traces of Chen's long
    segments are slow (few repeated blocks), so that their batch size is chosen by the
    formula and traced once; so are n and the batch size of every n-th block.

    Args:
        session: Its objective counts, and its batch size if it is given.
        policy: As in ``Request.checkpointing``, except ``auto``.

    Raises:
        InputError: If the policy or one of the named blocks is not known.
    """
    session = _without_chunks_and_options(session)
    is_searched = policy in ("sqrt", EVERY_N_POLICY)
    if is_searched:
        found = search(session.asking(checkpointing=policy))
        if found.estimate is not None:
            return found.estimate
    segments = policy_segments(session.block_chain, policy, session.smallest_searched)
    if is_searched and not (least := _at_smallest(session, segments)).fits:
        return least  # no larger batch fits: none is traced
    return best_with_segments(session, segments) or _at_smallest(session, segments)


def _at_smallest(session: PlanningSession, segments: tuple[Segment, ...]) -> Estimate:
    """Return fixed segments at the smallest batch size, which may take a trace more."""
    return session.judge(session.settings.recipe(session.smallest_batch, segments))


def policy_can_gain(session: PlanningSession, policy: str, known: Estimate) -> bool:
    """Whether a checkpointing policy may be faster than ``known`` at a batch size."""
    # By live bytes in all usable memory. False without ``checkpointing="auto"``, where
    # a plan is no other policy's.
    if session.request.checkpointing != "auto" or not session.workload.blocks:
        return False
    asked = _without_chunks_and_options(session).asking(checkpointing=policy)
    size, block_chain = asked.smallest_searched, asked.block_chain.streams_apart
    least_bytes = chain_peak_bytes(
        block_chain.profile_at(size), policy_segments(block_chain, policy, size)
    )
    if least_bytes > session.budget.usable_bytes * (1 + FORMULA_EXCESS):
        return False  # not even the least batch fits
    return can_gain(asked, known, 0.0)


def _without_chunks_and_options(session: PlanningSession) -> PlanningSession:
    """Return the session with a whole loss, its blocks kept or recomputed."""
    # Where it has a whole loss already, its chain's profiles serve.
    if session.settings.loss_chunks > 1:
        session = session.changed(loss_chunks=1)
    return replace(session, block_chain=session.block_chain.without_options)


def best_with_segments(
    session: PlanningSession, segments: tuple[Segment, ...]
) -> Estimate | None:
    """Return fixed segments at their best batch size, or None if none fits."""
    # Takes two traces, and one more where the chosen batch size is another program.
    batches = BaselineProfile(session, segments)
    for _ in range(MAX_REFUSALS):
        best = best_batch(session, batches.profile_at, batches.solve, sys.maxsize).best
        if best is None:
            break
        try:
            estimate = session.judge(session.settings.recipe(best.batch_size, segments))
        except TraceError:
            if session.request.batch_size is not None:
                raise
        else:
            if estimate.fits:
                return estimate
        batches.refused.add(best.batch_size)
    return None


class BaselineProfile:
    """Profile and solver of a baseline for ``choose_batch_size``, by replay.

    One micro-batch of the effective size is another program, which frees gradients: it
    is judged where it may fit without them. Its time is that of one that keeps them.
    """

    def __init__(self, session: PlanningSession, segments: tuple[Segment, ...]) -> None:
        self._session, settings = session, session.settings
        accumulation = 1 if settings.effective_batch_size in {None, 1} else 2
        self._recipe = replace(
            settings.recipe(2, segments),
            gradient_accumulation_steps=settings.accumulation or accumulation,
        )
        # The largest size known to fit, and the smallest known not to; 0: none is.
        self._fitting, self._failing = 0, 0
        self._seen: dict[int, bool] = {}
        self._reserved: dict[int, int] = {}
        self._whole_fits: bool | None = None
        self.refused: set[int] = set()

    def profile_at(self, batch_size: int) -> ChainProfile:
        """Return a chain of one block with the time of the whole micro-batch."""
        # A size that does not fit takes none: its time would need a trace more.
        time = StepTime(0, 0, 0)
        if self._fits(batch_size):
            try:
                time = self._time(batch_size)
            except TraceError:  # the model takes other sizes only
                if self._session.request.batch_size is not None:
                    raise
                self.refused.add(batch_size)
        block = BlockProfile(
            name="all",
            options=(_NOTHING,),
            gradient_bytes=0,
            output_bytes=0,
            forward_ns=time.forward_ns,
            backward_ns=time.backward_ns,
        )
        return ChainProfile(
            batch_size=batch_size,
            static_bytes=batch_size,  # no larger batch needs less
            input_bytes=0,
            optimizer_bytes=0,
            optimizer_ns=time.optimizer_ns,
            blocks=(block,),
        )

    def solve(self, problem: Problem) -> Solution:
        """Return a solution if the batch size fits in the replay."""
        size = problem.chain.batch_size
        return Solution(
            segments=() if size not in self.refused and self._fits(size) else None,
            proven_optimal=False,
            explanation="replayed",
        )

    def _time(self, size: int) -> StepTime:
        """Return the time of a step."""
        # Where each batch size is traced for itself, those that were not replayed have
        # the time on the line through two that fit: to trace each would take minutes.
        recipe, traces = replace(self._recipe, batch_size=size), self._session.traces
        fitting = sorted(each for each, fits in self._seen.items() if fits)
        if size in fitting or len(fitting) <= 1 or traces.is_affine(recipe):
            return step_time(traces.affine(recipe), recipe, self._session.workload.gpu)
        below = min(max(0, bisect_left(fitting, size) - 1), len(fitting) - 2)
        one, other = fitting[below : below + 2]
        share = (size - one) / (other - one)
        ends = zip(self._time(one), self._time(other), strict=True)
        return StepTime(*(round(low + share * (high - low)) for low, high in ends))

    def _fits(self, size: int) -> bool:
        """Whether a batch size fits, by the largest that does: memory is monotonic."""
        # That is found close to the largest by live bytes, and exactly where it
        # matters. Where each batch size is traced for itself, first the likely one is,
        # and then only sizes that are asked for.
        recipe = replace(self._recipe, batch_size=size)
        affine = self._session.traces.is_affine(recipe)
        if not self._failing:
            self._failing = self._largest_by_live_bytes(affine=affine) + 1
            if affine:
                self._fitting, self._failing = fitting_below(
                    self._replayed, self._failing - 1
                )
            elif self._session.request.batch_size is None:
                self._fitting = self._likely_fitting(self._failing - 1)
        if self._fitting < size < self._failing:
            if affine:
                self._fitting = bisect(self._replayed, self._fitting, self._failing)
                self._failing = self._fitting + 1
            elif self._replayed(size):  # else it may be too large, or not run
                self._fitting = size
        return size <= self._fitting or self._fits_whole(size, affine)

    def _fits_whole(self, size: int, affine: bool) -> bool:
        """Whether the whole effective batch fits, if that is this size."""
        session = self._session
        chain, recipe = session.block_chain, session.settings.recipe(size)
        if not chain.is_whole(size) or recipe.compile != "none":
            return False
        if self._whole_fits is None:
            freed_bytes, self._whole_fits = chain.gradient_bytes, False
            if size <= self._largest_by_live_bytes(freed_bytes, affine=affine):
                whole = replace(recipe, segments=self._recipe.segments)
                with contextlib.suppress(TraceError):
                    self._whole_fits = bool(session.judge(whole).fits)
        return self._whole_fits

    def _largest_by_live_bytes(self, freed_bytes: int = 0, *, affine: bool) -> int:
        """Return a size with no larger one whose live bytes are usable; 0: none.

        ``freed_bytes``: of the live bytes, what may be free already.
        """
        # Reserved bytes are never less, so no larger batch fits. Where each batch size
        # is traced for itself, live bytes are at least those on the line through two
        # sizes: what makes them grow otherwise grows faster.
        session, largest = self._session, self._session.largest_searched
        if affine:
            return largest_fitting_batch(
                lambda size: (
                    self._live_bytes(size) - freed_bytes <= session.budget.usable_bytes
                )
            )
        few, more = TRACED_BATCH_SIZES
        if session.settings.compile != "none":  # other kernels for the least batches
            return largest
        try:
            live_bytes = self._live_bytes(few) - freed_bytes
            growth = (self._live_bytes(more) - freed_bytes - live_bytes) // (more - few)
        except TraceError:  # the model takes other sizes only
            return largest
        if growth <= 0:
            return largest
        return max(more, few + (session.budget.usable_bytes - live_bytes) // growth)

    def _likely_fitting(self, most: int) -> int:
        """Return a size that fits, close to the largest, of those that are asked for.

        By the line through what two sizes reserve, which are traced already; 0: none.
        """
        few, more = TRACED_BATCH_SIZES
        if not all(map(self._replayed, TRACED_BATCH_SIZES)):
            return few if self._seen[few] else 0
        growth = (self._reserved[more] - self._reserved[few]) // (more - few)
        unused = self._session.budget.usable_bytes - self._reserved[more]
        likely = min(most, more + unused // growth if growth > 0 else most)
        whole = self._session.settings.effective_batch_size
        sizes = (
            batch_size_grid(likely)
            if whole is None
            else [size for size in range(more, likely + 1) if whole % size == 0]
        )
        tried = (size for size in sizes[:-3:-1] if size > more)  # the largest two
        return next(filter(self._replayed, tried), more)

    def _live_bytes(self, size: int) -> int:
        """Return the peak of live bytes at a batch size, each stream's by itself."""
        session, recipe = self._session, replace(self._recipe, batch_size=size)
        chain = session.block_chain
        measured = partial(
            LiveBytes.of,
            session.traces.affine(recipe),
            size,
            device_properties(session.workload.gpu),
            session.budget.allocator,
            exact_blocks=False,
        )
        live = measured()
        if chain.streams_apart is not chain:
            live = measured(beside_bytes=live.side_stream_bytes())
        return int(live.after.max())

    def _replayed(self, size: int) -> bool:
        if size not in self._seen:
            recipe = replace(self._recipe, batch_size=size)
            try:
                trace = self._session.traces.affine(recipe)
            except TraceError:
                if self._session.request.batch_size is not None:
                    raise
                self._seen[size] = False
                return False
            if trace.exceeded_limit(size) is not None:
                self._seen[size] = False
                return False
            line = replay(
                trace,
                size,
                self._session.workload.gpu,
                limit_bytes=self._session.budget.usable_bytes,
                settings=self._session.budget.allocator,
                micro_steps=recipe.gradient_accumulation_steps,
                breakdown=False,
            )
            self._seen[size] = line.failed_bytes is None and line.retries == 0
            self._reserved[size] = line.reserved_bytes
        return self._seen[size]
