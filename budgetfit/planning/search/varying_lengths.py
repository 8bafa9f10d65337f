"""Settings that hold for all lengths of the samples, not only for the longest.

A recipe that fits at the longest length is replayed over sequences of batches of drawn
lengths. What then exceeds the budget is mended in the order of what it costs: the
longest batch first, or expandable segments, cost nothing; batches that are padded to a
multiple of so many tokens cost time, and so do settings that need less memory. The
fastest over these lengths is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from budgetfit.core.budget import Budget
from budgetfit.core.loop import RUN, Loop
from budgetfit.core.plan import Estimate
from budgetfit.core.samples.image_sizes import SampleSizes, Size
from budgetfit.core.step_trace import StepTrace
from budgetfit.core.varying_lengths import LengthsMeasure, VaryingLengths
from budgetfit.errors import InputError, TraceError
from budgetfit.memory.replay import UNLIMITED_BYTES, replay
from budgetfit.memory.replay_sequence import StepSequence
from budgetfit.planning.search.last_batch import warnings_after_last_batch
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.search.rate_over_lengths import RateOverLengths
from budgetfit.planning.search.smaller_budget import (
    MOST_SEARCHES,
    ROUNDS,
    with_less_memory,
)
from budgetfit.planning.session import PlanningSession
from budgetfit.traces.length_traces import LengthsNotTracedError, LengthTraces
from budgetfit.traces.session import TraceSession
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.format_rate import rate_text

if TYPE_CHECKING:
    Draws = list[list[tuple[Any, ...]]]  # of orders, updates and micro-batches

ORDERS: Final = 3  # seeds of the draws
UPDATES: Final = 200  # per order
# Other orders may reserve more: of what the lengths add to the longest batch alone.
# Where segments do not expand it is at least one more block of the largest size.
OTHER_ORDERS: Final = 0.5
MICRO_BATCHES: Final = 4  # of an update; as many as ``with_micro_steps`` replays
# Of the longest batch, of that of the fastest batch size: over all lengths such a one
# may be the fastest.
SIMILAR_RATE: Final = 0.85
_NOT_JUDGED: Final = (InputError, LengthsNotTracedError, TraceError)
_ONLY_LONGEST: Final = "only the largest batch was judged, not the smaller ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLengths:
    """An estimate that holds for all lengths, or says why that is not known.

    Attributes:
        estimate: With what is reserved over the lengths, and the measure in its recipe.
        lengths: The measure and its figures; None where nothing could be judged.
        warnings: What a user has to do, or to know.
    """

    estimate: Estimate
    lengths: VaryingLengths | None = None
    warnings: tuple[str, ...] = ()


def judge_all_lengths(session: PlanningSession, best: Estimate) -> JudgedLengths:
    """Return settings that hold for all lengths of the workload's samples."""
    # ``best`` fits at the longest. It is returned unchanged where lengths do not vary.
    lengths = session.workload.lengths
    if lengths is None or not lengths.vary:
        return JudgedLengths(estimate=best)
    try:
        found = list(_candidates(session, best, lengths))
    except _NOT_JUDGED as error:
        text = f"{_ONLY_LONGEST}: {error}"
        return JudgedLengths(estimate=best, warnings=(text,))
    fitting = [row for row in found if _of(row).fits]
    rate = max((_of(row).samples_per_s for row in fitting), default=0.0)
    faster = list(_of_other_batch_sizes(session, best, rate))
    found, fitting = [*found, *faster], [*fitting, *faster]
    if fitting:
        fastest = max(fitting, key=lambda row: _of(row).samples_per_s)
        plain = max(_of(row).plain_samples_per_s for row in found)
        over = replace(_of(fastest), plain_samples_per_s=plain)
        return replace(fastest, lengths=over)
    least = min(found, key=lambda row: _of(row).reserved_bytes)
    text = (
        "batches of several lengths may run out of memory: the allocator fragments up "
        f"to {format_bytes(_of(least).reserved_bytes)}. Pad all to "
        "the largest"
    )
    return replace(least, warnings=(*least.warnings, text))


def _judge(session: PlanningSession, estimate: Estimate) -> LengthsJudge:
    steps = estimate.recipe.gradient_accumulation_steps
    return LengthsJudge(session.traces, session.budget, estimate, rated_steps=steps)


def estimate_all_lengths(
    traces: TraceSession,
    budget: Budget,
    estimate: Estimate,
    *,
    keep_own_checkpointing: bool,
    loop: Loop,
) -> Estimate:
    """Return an estimate of a given recipe over all lengths of the samples."""
    lengths = traces.workload.lengths
    if lengths is None or not lengths.vary:
        return estimate
    if estimate.recipe.compile != "none":
        note = f"{_ONLY_LONGEST}: torch.compile compiles each size anew"
        return replace(estimate, notes=(*estimate.notes, note))
    first = estimate.recipe.longest_batch_first
    try:
        judge = LengthsJudge(
            traces,
            budget,
            estimate,
            rated_steps=estimate.recipe.gradient_accumulation_steps,
            keep_own_checkpointing=keep_own_checkpointing,
            loop=loop,
        )
        found = judge.judged("longest first" if first else "none", most=UNLIMITED_BYTES)
    except _NOT_JUDGED as error:
        return replace(estimate, notes=(*estimate.notes, f"{_ONLY_LONGEST}: {error}"))
    judged = _of(found)
    note = (
        f"{format_bytes(judged.reserved_bytes)} are reserved in {judged.updates} "
        f"updates of random sizes ({judged.span}), with room for other orders; "
        f"{format_bytes(estimate.reserved_bytes)} with the largest alone; "
        f"{rate_text(judged.samples_per_s)} samples/s over these sizes"
    )
    if not first and not budget.allocator.expandable_segments:
        note += ". Unless the largest comes first, some orders reserve twice as much"
    return replace(found.estimate, notes=(*estimate.notes, note, *found.warnings))


def with_lengths(estimate: Estimate, lengths: VaryingLengths) -> Estimate:
    """Return an estimate with what the lengths take, their rate, and the measure."""
    beyond = max(lengths.reserved_bytes - estimate.reserved_bytes, 0)
    span = estimate.process_range_bytes
    first = lengths.measure == "longest first"
    return replace(
        estimate,
        recipe=replace(estimate.recipe, longest_batch_first=first),
        reserved_bytes=estimate.reserved_bytes + beyond,
        process_bytes=estimate.process_bytes + beyond,
        process_range_bytes=span and (span[0] + beyond, span[1] + beyond),
        fits=lengths.fits,
        data_samples_per_s=lengths.samples_per_s,
    )


def session_for_lengths(
    session: PlanningSession, lengths: VaryingLengths | None
) -> PlanningSession:
    """Return the session, judged with expandable segments if that is the measure."""
    if lengths is None or lengths.measure != "expandable segments":
        return session
    return session.asking(budget=session.budget.with_expandable_segments())


def _of(judged: JudgedLengths) -> VaryingLengths:
    assert judged.lengths is not None  # noqa: S101 - of ``_candidates``
    return judged.lengths


def _candidates(
    session: PlanningSession, best: Estimate, lengths: SampleSizes
) -> Iterator[JudgedLengths]:
    """Yield what may hold; nothing after the first that does so at no cost."""
    judge = _judge(session, best)
    tried = judge.first_that_fits()
    yield tried
    if _of(tried).fits:
        return
    fitting_samples_per_s = 0.0
    for multiple in lengths.multiples:
        padded = judge.first_that_fits(multiple)
        yield padded
        if _of(padded).fits:  # a larger one takes longer
            fitting_samples_per_s = _of(padded).samples_per_s
            break
    # First the next best settings: of another kind (a loss in chunks) they may
    # fragment far less. Then those that need less by what was too much.
    smaller, known, excess = session, best, 0
    for _ in range(MOST_SEARCHES):
        found = with_less_memory(smaller, known, excess)
        if found is None:
            return
        smaller, own, known = found
        judge = _judge(own.asking(budget=session.budget), known)
        if judge.samples_per_s() <= fitting_samples_per_s:
            return
        tried = judge.first_that_fits()
        yield tried
        if _of(tried).fits:
            return
        excess = judge.least_reserved_bytes() - session.budget.usable_bytes


def _of_other_batch_sizes(
    session: PlanningSession, best: Estimate, samples_per_s: float
) -> Iterator[JudgedLengths]:
    """Yield what fits with the next smaller or larger batch, and is faster."""
    # Which size is the fastest at the longest length need not be over all: a smaller
    # batch is padded less, and of short samples a larger one keeps the GPU busy.
    update = best.recipe.samples_per_rank
    request, given = session.request, session.settings.effective_batch_size
    if given is None or request.batch_size or request.objective != "throughput":
        return
    sizes = [size for size in range(1, update + 1) if update % size == 0]
    place = sizes.index(best.recipe.batch_size)
    for size in (*sizes[place + 1 : place + 2], *sizes[max(place - 1, 0) : place]):
        try:
            found = search_with_loss_chunks(session.asking(batch_size=size), ROUNDS)
            at_longest, own = found.estimate, found.session
            if at_longest is None or at_longest.samples_per_s < (
                SIMILAR_RATE * best.samples_per_s
            ):
                continue
            judge = _judge(own, at_longest)
        except _NOT_JUDGED:  # the model may not run at that size
            continue
        if judge.samples_per_s() <= samples_per_s:
            continue
        tried = judge.first_that_fits()
        there = session_for_lengths(session, tried.lengths)
        then = own.asking(budget=there.budget)
        if _of(tried).fits and not warnings_after_last_batch(then, tried.estimate):
            samples_per_s = _of(tried).samples_per_s
            yield tried


class LengthsJudge:
    """Judges one recipe over sequences of batches of drawn lengths."""

    def __init__(  # noqa: PLR0913 - one value each, all needed
        self,
        traces: TraceSession,
        budget: Budget,
        estimate: Estimate,
        *,
        rated_steps: int,
        keep_own_checkpointing: bool = False,
        loop: Loop = RUN,
    ) -> None:
        """Trace a few lengths.

        Args:
            traces: Of a workload whose lengths vary.
            budget: What must not be exceeded.
            estimate: Of the recipe, at the longest.
            rated_steps: Micro-batches per update, for the rate.
            keep_own_checkpointing: As in ``TraceSession.exact``; so is ``loop``.
            loop: The training loop.

        Raises:
            InputError: If the model has no positions for one of them.
            LengthsNotTracedError: If they have no common program.
            TraceError: If the model cannot be traced at one of them.
        """
        recipe, workload, lengths = (
            estimate.recipe,
            traces.workload,
            traces.workload.lengths,
        )
        assert lengths is not None  # noqa: S101 - callers have checked
        self._budget, self._estimate, self._lengths = budget, estimate, lengths
        self._extent: Callable[[Any], int] = lengths.extent

        def trace_at(length: int | Size) -> StepTrace:
            own = traces
            if length != lengths.planned:
                own = traces.of_same_model(workload.at_length(length))
            return own.exact(
                recipe, keep_own_checkpointing=keep_own_checkpointing, loop=loop
            )

        steps = recipe.gradient_accumulation_steps
        self._draws: Draws = [
            [*lengths.draw(recipe.batch_size, min(steps, MICRO_BATCHES), UPDATES, seed)]
            for seed in range(ORDERS)
        ]
        drawn = {size for draw in self._draws for row in draw for size in row}
        self._traces = LengthTraces(trace_at, recipe.batch_size, lengths, drawn)
        # The steps that are replayed have no evaluations between them.
        self._alone_bytes = estimate.reserved_bytes
        if loop.evaluation_batch_size:
            self._alone_bytes = replay(
                trace_at(lengths.planned),
                recipe.batch_size,
                workload.gpu,
                limit_bytes=UNLIMITED_BYTES,
                settings=budget.allocator,
                micro_steps=steps,
                breakdown=False,
            ).reserved_bytes
        self._replays = {
            settings: StepSequence(
                self._traces.program_at,
                workload.gpu,
                micro_steps=steps,
                settings=settings,
            )
            for settings in (
                budget.allocator,
                budget.allocator.with_expandable_segments(),
            )
        }
        self._rates = RateOverLengths(
            self._traces.traced, estimate, workload.gpu, lengths, rated_steps
        )

    @property
    def _measures(self) -> tuple[LengthsMeasure, ...]:
        """The measures, none of which costs time; the simplest first."""
        # Without one it depends on the order of the batches how far memory fragments:
        # some reserve twice what the longest batch takes.
        recipe = self._estimate.recipe
        # Where each backward is an update, or DeepSpeed's, it cannot be dropped.
        first = not recipe.optimizer_in_backward and recipe.zero_stage is None
        if self._budget.allocator.expandable_segments:
            return ("longest first" if first else "none",)
        return (*(("longest first",) if first else ()), "expandable segments")

    def first_that_fits(self, padded_to: int = 1) -> JudgedLengths:
        """Return the estimate with the first measure that suffices, else the last."""
        alike = padded_to == self._lengths.planned
        for measure in ("none",) if alike else self._measures:
            found = self.judged(measure, padded_to)
            if _of(found).fits:
                break
        return found

    def least_reserved_bytes(self) -> int:
        """Return what one order and others may reserve, by the best measure."""
        return min(
            self._with_others(
                measure, self._reserved(measure, UNLIMITED_BYTES, 1, self._draws[:1])[0]
            )
            for measure in self._measures
        )

    def _with_others(
        self, measure: LengthsMeasure, reserved_bytes: int, padded_to: int = 1
    ) -> int:
        """Return what is reserved in these orders, with room for other ones."""
        growth = max(reserved_bytes - self._alone_bytes, 0)
        if padded_to == self._lengths.planned:  # there are no other ones
            return self._estimate.reserved_bytes + growth
        others = round(growth * OTHER_ORDERS)
        replays, expandable = self._replay(measure)
        if not expandable:
            longest = replays.largest_block_bytes(self._lengths.planned)
            others = max(others, longest)
        return self._estimate.reserved_bytes + growth + others

    def judged(
        self, measure: LengthsMeasure, padded_to: int = 1, most: int | None = None
    ) -> JudgedLengths:
        """Return the estimate with a measure, and batches padded to a multiple.

        Not replayed further than to ``most`` bytes; None: to what is usable.
        """
        estimate, budget = self._estimate, self._budget
        most = budget.usable_bytes if most is None else most
        reserved, updates = self._reserved(measure, most, padded_to, self._draws)
        reserved = self._with_others(measure, reserved, padded_to)
        lengths = VaryingLengths(
            span=self._lengths.span(),
            shortest=self._extent(self._lengths.shortest),
            longest=self._extent(self._lengths.planned),
            measure=measure,
            reserved_bytes=reserved,
            updates=updates,
            samples_per_s=self.samples_per_s(padded_to),
            plain_samples_per_s=self.samples_per_s(),
            grouped_samples_per_s=self._rates.grouped(),
            fits=budget.holds(reserved, estimate.host_bytes),
            pad_to_multiple_of=padded_to if padded_to > 1 else None,
        )
        return JudgedLengths(
            estimate=replace(
                with_lengths(estimate, lengths), usable_bytes=budget.usable_bytes
            ),
            lengths=lengths,
            warnings=self._host_warnings(),
        )

    def _host_warnings(self) -> tuple[str, ...]:
        """Warn where the pinned buffers of all lengths may exceed the host's memory."""
        # PyTorch rounds them up to powers of two and uses those of one power for no
        # other (``ATen/core/CachingHostAllocator.h``): with 1 + 1/2 + 1/4 ... of the
        # longest's, less than twice as much is pinned.
        most, limit = 2 * self._estimate.host_bytes, self._budget.host_ram_bytes
        pins = self._estimate.recipe.offloads_activations  # which lengths change
        if limit is None or most <= limit or not pins:
            return ()
        text = (
            f"batches of several lengths may pin up to {format_bytes(most)} of host "
            f"memory, of {format_bytes(limit)}: buffers of one size are not used for "
            "another. Pad all to the largest, or say host_ram= half as "
            "large"
        )
        return (text,)

    def _replay(self, measure: LengthsMeasure) -> tuple[StepSequence, bool]:
        """Return the replay with a measure, and whether its segments expand."""
        settings = self._budget.allocator
        if measure == "expandable segments":
            settings = settings.with_expandable_segments()
        return self._replays[settings], settings.expandable_segments

    def _reserved(
        self, measure: LengthsMeasure, most_bytes: int, padded_to: int, draws: Draws
    ) -> tuple[int, int]:
        """Return the most that is reserved in any order, and the updates replayed."""
        # Stops at the first update that exceeds ``most_bytes``.
        replays, _ = self._replay(measure)
        first = self._lengths.planned if measure == "longest first" else None
        reserved = count = 0
        for draw in draws:
            updates = [tuple(self._padded(n, padded_to) for n in row) for row in draw]
            peaks = replays.peaks(updates, longest_first=first, most_bytes=most_bytes)
            reserved = max(reserved, peaks.reserved_bytes)
            count += peaks.updates
            if reserved > most_bytes:
                break
        return reserved, count

    def samples_per_s(self, padded_to: int = 1) -> float:
        """Return the rate over drawn batches, estimated."""
        return self._rates.drawn(
            range(ORDERS), UPDATES, lambda length: self._padded(length, padded_to)
        )

    def _padded(self, length: Any, multiple: int) -> Any:  # noqa: ANN401 - a size
        return self._lengths.padded(length, multiple) if multiple > 1 else length
