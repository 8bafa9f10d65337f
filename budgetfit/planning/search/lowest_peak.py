"""The lowest peak of any plan: decides whether some plan fits."""

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Unpack

from budgetfit.batches.batch_tree import has_sparse_tensors
from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError, TraceError
from budgetfit.memory.chain.peak import chain_host_bytes, chain_peak_bytes
from budgetfit.planning.profiling.block_chain import BlockChain, checkpoint_every_block
from budgetfit.planning.search.loss_chunking import (
    LOWEST_CHUNKS,
    chunked_best,
    with_more_loss_chunks,
)
from budgetfit.planning.search.policies import policy_segments
from budgetfit.planning.search.solver_choice import (
    MAX_SEGMENT,
    lowest_peak_nested,
    without_host_options,
)
from budgetfit.planning.session import (
    PlanningSession,
    Request,
    SessionSettings,
    open_sessions,
)
from budgetfit.solvers.chain_dp import lowest_peak
from budgetfit.solvers.host_limit import host_holds
from budgetfit.solvers.problem import Problem, longest_segment, segment
from budgetfit.solvers.uniform_segments import every_uniform_length
from budgetfit.traces.session import smallest_sizes
from budgetfit.utils.garbage_collection import freeze_gc
from budgetfit.workload.workload import Workload

# A recipe with slightly more live bytes may reserve less. So many are judged, and more
# while their traces are short.
# Share of the peak: of similar ones the simplest come first, then least pinned memory.
SIMILAR_PEAK: Final = 0.01
MAX_JUDGED: Final = 6
MAX_EVENTS: Final = 100_000
MAX_EVENTS_PROVEN: Final = 10_000  # where no plan can fit, whatever it recomputes
# A peak just above the budget is searched longer: small changes save 20 MiB segments.
NEARLY_FITS: Final = 0.04  # above what is usable
MAX_EVENTS_NEARLY_FITS: Final = 400_000
# So far above what is usable no choice of segments fits: the allocator reserved up to
# 8 % less for one with more live bytes. Judging on only makes a refusal slower.
FAR_ABOVE: Final = 1.5
# The loss is not chunked further to save less than this share of the peak.
MIN_SAVED: Final = 0.002
MAX_MIXTURES: Final = 1000  # three blocks have about 500
# 8 to 64 chunks save at most this share of what 1 to 8 do.
MAX_NEXT_SAVING: Final = 1 / 7
# The formula exceeds the allocated bytes by at most this share: it is fitted to traces
# at two and three samples, and one sample in a chunked loss may need fewer copies.
FORMULA_ERROR: Final = 0.2
# Outside of a chunked loss, where a recipe of the same batch size was judged and agrees
# with it: of 225 recipes (docs/accuracy.md) the formula exceeds none by more.
CHECKED_ERROR: Final = 0.01
MAX_JUDGED_PROVEN: Final = 3  # where the formula, so checked, says that nothing fits


class LowestPeak(NamedTuple):
    """The lowest peak found, and the ``limit_bytes`` that are usable.

    ``fits`` may be False below the limit too: the allocator may have had to retry.
    ``estimate`` is None where nothing was worth judging.
    """

    needed_bytes: int
    limit_bytes: int
    fits: bool
    estimate: Estimate | None = None


@freeze_gc()
def lowest_peak_plan(
    workload: Workload,
    request: Request,
    **settings: Unpack[SessionSettings],
) -> LowestPeak:
    """Return a recipe that fits, or the lowest peak of weights on the GPU.

    At the request's batch size, at the smallest or with the effective batch in one
    micro-batch; without an effective batch size, one micro-batch per optimizer step.
    The arguments are those of ``make_plan``, which finds a plan wherever this fits.

    Raises:
        TraceError: If the model cannot be traced.
    """
    sizes = [1]  # other sizes of sparse batches are not known
    if request.batch_size is not None:
        sizes = [request.batch_size]
    elif not has_sparse_tensors(workload.batch):
        sizes = smallest_sizes(workload)
    found: list[LowestPeak] = []
    for session in open_sessions(workload, request, sizes=sizes, **settings):
        if not session.host_may_hold:
            continue
        least = fitting_or_lowest(session)
        if least.fits:
            return least
        if not session.offloads:
            found.append(least)
    return min(found, key=lambda each: each.needed_bytes)


def fitting_or_lowest(session: PlanningSession) -> LowestPeak:
    """Return a recipe that fits, or else the lowest peak."""
    # Recipes that are too large by the formula are not judged; then ``needed_bytes`` is
    # the formula's, which ignores what the allocator reserves.
    least = _fitting_or_lowest(session)
    whole = None if least.fits else _whole_batch(session, least.estimate)
    if whole is None:
        return least
    other = _fitting_or_lowest(whole)
    return min(least, other, key=lambda each: (not each.fits, each.needed_bytes))


def _whole_batch(
    session: PlanningSession, least: Estimate | None
) -> PlanningSession | None:
    """Return the session with the effective batch in one micro-batch.

    Without accumulation no gradients are alive in the forward, so that its peak may be
    below that of batch 1. None where it cannot be: where activations of the other
    samples take more than all gradients. ``least``: the lowest peak at batch 1.
    """
    size = session.settings.effective_batch_size or 1
    if session.request.batch_size is not None or size == 1:
        return None
    parameters = session.workload.model.parameters()
    saved_bytes = 4 * sum(each.numel() for each in parameters if each.requires_grad)
    added_bytes = 0 if least is None else least.at_peak_bytes.get("activations", 0)
    if added_bytes * (size - 1) > saved_bytes:
        return None
    return session.asking(batch_size=size)


def _fitting_or_lowest(session: PlanningSession) -> LowestPeak:
    """Return the same at one batch size."""
    limit_bytes = session.budget.usable_bytes
    usual: list[Estimate] = []
    loads = session.base_loads
    for full in _full_checkpointing(session):
        if full.fits or not loads or full.timeline.floor_bytes > limit_bytes:
            return LowestPeak(full.reserved_bytes, limit_bytes, bool(full.fits), full)
        usual.append(full)
    # Traces for all sizes are worth it for a plan alone.
    chain = session.block_chain.only_at(session.smallest_batch)
    rated = _lowest_by_formula(replace(session, block_chain=chain))
    checked = _is_checked(rated, usual)
    least = _least_judged(
        [row for row in rated if not row.is_above(limit_bytes, checked=checked)]
    )
    if least is None:
        formula_bytes = min(row.peak_bytes for row in rated)
        return LowestPeak(formula_bytes, limit_bytes, fits=False)
    return LowestPeak(least.reserved_bytes, limit_bytes, bool(least.fits), least)


def _full_checkpointing(session: PlanningSession) -> Iterator[Estimate]:
    """Judge every block recomputed, at last with its input on the host, if free."""
    # Each is one trace, where the formula takes several.
    least = 0
    for full in _every_block_recomputed(session):
        yield full
        least = full.allocated_bytes
    if least <= session.budget.usable_bytes * FAR_ABOVE:
        yield from _every_input_on_host(session, LOWEST_CHUNKS[:1])


def _every_block_recomputed(session: PlanningSession) -> Iterator[Estimate]:
    """Judge every block recomputed, and that with a chunked loss, if free to choose."""
    # One program each: the first gives a lower bound for any choice of segments.
    if session.request.checkpointing != "auto":
        return
    segments = checkpoint_every_block(session.workload.blocks)
    for of_one_loss in with_more_loss_chunks(session)[:2]:
        recipe = of_one_loss.settings.recipe(session.smallest_batch, segments)
        try:
            yield of_one_loss.judge(recipe)
        except (InputError, TraceError):
            if of_one_loss is session:
                raise
            return  # the loss is not cut into parts


def _every_input_on_host(
    session: PlanningSession, counts: Sequence[int] = LOWEST_CHUNKS[:2]
) -> Iterator[Estimate]:
    """Judge every block recomputed with its input on the host, if that may be.

    With the last of these counts of loss chunks.
    """
    can_offload = "offload" in session.block_chain.option_kinds
    limit_bytes = session.budget.host_ram_bytes
    if session.request.checkpointing != "auto" or not can_offload or limit_bytes == 0:
        return
    *_, of_one_loss = with_more_loss_chunks(session, counts)
    segments = tuple(
        replace(each, input_on_host=True)
        for each in checkpoint_every_block(session.workload.blocks)
    )
    recipe = of_one_loss.settings.recipe(session.smallest_batch, segments)
    with contextlib.suppress(InputError, TraceError):
        found = of_one_loss.judge(recipe)
        if limit_bytes is None or found.host_bytes <= limit_bytes:
            yield found


def lowest_judged(session: PlanningSession) -> Estimate:
    """Return the lowest judged peak at the request's batch size, or any.

    With ``checkpointing="auto"`` several recipes that are lowest by the formula are
    judged, with and without loss chunks: the allocator may reserve less for one with
    slightly more live bytes. The first that fits ends the search. Of large models whose
    optimizer step alone is too much, only every block recomputed.
    """
    least = _lowest_judged(session)
    whole = None if least.fits else _whole_batch(session, least)
    if whole is None:
        return least
    other = _lowest_judged(whole)
    return min(least, other, key=lambda each: (not each.fits, each.reserved_bytes))


def _lowest_judged(session: PlanningSession) -> Estimate:
    """Return the same at one batch size."""
    kept = session.block_chain.all_kept(session.smallest_searched)
    if len(kept.events) > MAX_EVENTS_PROVEN and not session.may_fit:
        usual = _every_block_recomputed(session)
        full = [*itertools.islice(usual, 1), *_every_input_on_host(session)]
        if len(full) == 1:  # else the last is the lowest, whose loss has more chunks
            full += usual
        least = min(full, key=lambda each: each.reserved_bytes, default=None)
        floor_bytes = min((each.timeline.floor_bytes for each in full), default=0)
        proven = floor_bytes > session.budget.usable_bytes or not session.setup_fits
        if least is not None and proven:
            return least
    least = _least_judged(_lowest_by_formula(session))
    assert least is not None  # noqa: S101 - the list is never empty
    return least


class _Rated(NamedTuple):
    """A recipe, its session, and its peaks by the formula.

    ``exact_bytes`` is the peak without what a chunked loss takes.
    """

    peak_bytes: int
    host_bytes: int
    session: PlanningSession
    recipe: Recipe
    exact_bytes: int = 0

    def is_above(self, limit_bytes: int, *, checked: bool = False) -> bool:
        """Whether the peak is above a limit, allowing for the formula's error.

        ``checked``: as ``_is_checked`` says.
        """
        return self.peak_bytes > limit_bytes * (1 + FORMULA_ERROR) or (
            checked and self.exact_bytes > limit_bytes * (1 + CHECKED_ERROR)
        )

    @property
    def kinds(self) -> int:
        """The number of distinct segment kinds: more kinds fragment more."""
        rows = self.recipe.segments
        return len({replace(row, blocks=("",) * len(row.blocks)) for row in rows})


def _lowest_of_few(rated: Sequence[_Rated], judged: Sequence[Estimate]) -> Estimate:
    """Return the lowest of what is judged already and of a few more."""
    # Of the same segments those whose loss has the most chunks leave the least cached.
    chunks: dict[tuple[Segment, ...], int] = {}
    for recipe in (row.recipe for row in rated):
        known = chunks.get(recipe.segments, 0)
        chunks[recipe.segments] = max(known, recipe.loss_chunks)
    recipes = {each.recipe for each in judged}
    more = [
        row
        for row in rated
        if row.recipe.loss_chunks == chunks[row.recipe.segments]
        and row.recipe not in recipes
    ]
    left = max(0, MAX_JUDGED_PROVEN - len(judged))
    found = [*judged, *(row.session.judge(row.recipe) for row in more[:left])]
    return min(found, key=lambda each: each.reserved_bytes)


def _nothing_fits(rated: Sequence[_Rated], judged: Sequence[Estimate]) -> bool:
    """Whether all are above what is usable by a formula that judged ones agree with."""
    return _is_checked(rated, judged) and all(
        row.is_above(row.session.budget.usable_bytes, checked=True) for row in rated
    )


def _is_checked(rated: Sequence[_Rated], judged: Sequence[Estimate]) -> bool:
    """Whether judged recipes take what the formula says; False if none tells."""
    # What sharding gathers and reduces on streams of its own is not counted as exactly.
    exact_bytes = {
        row.recipe: row.exact_bytes
        for row in rated
        if row.recipe.parallelism is None or row.recipe.parallelism.engine == "ddp"
    }
    agrees = [
        _exact_bytes(each) >= exact_bytes[each.recipe] * (1 - CHECKED_ERROR)
        for each in judged
        if each.recipe in exact_bytes
    ]
    return bool(agrees) and all(agrees)


def _exact_bytes(judged: Estimate) -> int:
    """Return the allocated peak of the steps, without what a chunked loss takes."""
    if judged.recipe.loss_chunks == 1:
        return judged.allocated_bytes
    counted = (
        point.allocated_bytes
        for point in judged.timeline.points
        if point.step >= 0 and (point.block or point.phase == "optimizer")
    )
    return max(counted, default=0)


def _least_judged(rated: Sequence[_Rated]) -> Estimate | None:
    """Return the lowest judged peak, or the first that fits; None if empty."""
    # Of large models of which no plan can fit, that of the first few.
    least: Estimate | None = None
    judged: list[Estimate] = []
    events = 0
    most_events = MAX_EVENTS
    is_far_above = False
    for number, row in enumerate(rated):
        if number >= MAX_JUDGED and (events > most_events or is_far_above):
            break
        if least is not None and row.is_above(least.reserved_bytes):
            continue
        found = row.session.judge(row.recipe)
        if found.fits:
            return found
        judged.append(found)
        if least is None or found.reserved_bytes < least.reserved_bytes:
            least = found
        usable_bytes = row.session.budget.usable_bytes
        if least.reserved_bytes <= usable_bytes * (1 + NEARLY_FITS):
            most_events = MAX_EVENTS_NEARLY_FITS
        is_far_above = least.reserved_bytes > usable_bytes * FAR_ABOVE
        traced = len(row.session.traces.exact(row.recipe).events)
        if traced > MAX_EVENTS_PROVEN:
            if found.timeline.floor_bytes > usable_bytes:
                break
            if _nothing_fits(rated, judged):
                return _lowest_of_few(rated, judged)
        events += traced
    return least


def _lowest_by_formula(session: PlanningSession) -> list[_Rated]:
    """Return recipes by ascending peak, of about equal ones the simplest first."""
    rated: list[_Rated] = []
    lowest = sys.maxsize
    size = session.smallest_batch
    for of_one_loss in with_more_loss_chunks(session, LOWEST_CHUNKS):
        try:
            chain = of_one_loss.block_chain.profile_at(size)
        except (InputError, TraceError) as error:
            if of_one_loss is session:
                raise
            session.traces.log.append(f"the loss is not cut into parts: {error}")
            break
        chunked = of_one_loss.settings.loss_chunks > 1
        exact = chunked_best(chain) if chunked else chain
        # Where weights are gathered several segments make the same recipe.
        recipes = dict.fromkeys(
            of_one_loss.settings.recipe(size, segments)
            for segments in _segments_to_try(of_one_loss)
        )
        rated += [
            _Rated(
                chain_peak_bytes(chain, recipe.segments),
                chain_host_bytes(chain, recipe.segments),
                of_one_loss,
                recipe,
                chain_peak_bytes(exact, recipe.segments),
            )
            for recipe in recipes
        ]
        before, lowest = lowest, min(row.peak_bytes for row in rated)
        if (before - lowest) * MAX_NEXT_SAVING < MIN_SAVED * lowest:
            break
    step = max(1, round(lowest * SIMILAR_PEAK))
    return sorted(
        rated, key=lambda row: (row.peak_bytes // step, row.kinds, row.host_bytes)
    )


def _segments_to_try(session: PlanningSession) -> list[tuple[Segment, ...]]:
    """Return candidate segments for the lowest peak, without repetitions."""
    block_chain, size = session.block_chain, session.smallest_batch
    policy = session.request.checkpointing
    if policy != "auto":
        return [policy_segments(block_chain, policy, size)]
    problem = Problem(chain=block_chain.profile_at(size), limit_bytes=sys.maxsize)
    on_device = replace(problem, chain=without_host_options(problem.chain))
    tried = [
        lowest_peak_nested(problem).segments,
        lowest_peak_nested(on_device).segments,
        lowest_peak(on_device).segments,
        *_equal_segments(problem),
        *_nearly_every_block_alone(block_chain, problem.chain),
        *_every_mixture(problem.chain),
        *(policy_segments(block_chain, name, size) for name in ("none", "full")),
    ]
    return list(dict.fromkeys(each for each in tried if each is not None))


def _nearly_every_block_alone(
    block_chain: BlockChain, chain: ChainProfile
) -> Iterator[tuple[Segment, ...]]:
    """Yield every block recomputed alone, but for one that is treated differently.

    That one's input stays on the GPU where all others are on the host, or two or three
    blocks are one segment.
    """
    # One live tensor more or less may save a 20 MiB segment: 6 % of the peak of a model
    # of 50 M parameters. Long traces get none, because too few of them are judged.
    program = block_chain.all_recomputed(chain.batch_size)
    if program is None or len(program.trace.events) * MAX_JUDGED > MAX_EVENTS:
        return
    alone = checkpoint_every_block(block_chain.traces.workload.blocks)
    starts = {block.name: start for start, block in enumerate(chain.blocks)}
    for length, number in itertools.product((2, 3), range(len(alone))):
        start = starts[alone[number].blocks[0]]
        if longest_segment(chain, start, length) == length:
            longer = segment(chain, start, length)
            yield (*alone[:number], longer, *alone[number + length :])
    on_host = [replace(block, input_on_host=True) for block in alone]
    for number, block in enumerate(alone):
        segments = (*on_host[:number], block, *on_host[number + 1 :])
        try:
            if host_holds(chain, segments):
                yield segments
        except InputError:  # not an option of all blocks
            return


def _every_mixture(chain: ChainProfile) -> Iterator[tuple[Segment, ...]]:
    """Yield every choice of one option per block, for a chain of a few blocks."""
    # The allocator can reserve less for a choice that is live with a little more: 2.5 %
    # less with three blocks of 1,024 channels.
    if math.prod(len(block.options) for block in chain.blocks) > MAX_MIXTURES:
        return
    for options in itertools.product(*(block.options for block in chain.blocks)):
        segments = tuple(
            Segment(
                (block.name,),
                option.mode,
                saved_ops=option.saved_ops,
                input_on_host=option.input_on_host,
            )
            for block, option in zip(chain.blocks, options, strict=True)
            if option.mode != "keep"
        )
        if host_holds(chain, segments):
            yield segments


def _equal_segments(problem: Problem) -> Iterator[tuple[Segment, ...]]:
    """Yield the two lengths of lowest peak of each kind of uniform segments."""
    # The solver mixes kinds and lengths to save a few live bytes; uniform segments
    # fragment less.
    longer = replace(problem, max_segment=MAX_SEGMENT)
    plans = [plan for _, plan in every_uniform_length(longer)]
    for nested, on_host in itertools.product((False, True), repeat=2):
        rated = []
        for number, plan in enumerate(plans):
            kind = tuple(
                replace(
                    row, nested=nested and len(row.blocks) > 1, input_on_host=on_host
                )
                for row in plan
            )
            try:
                if host_holds(problem.chain, kind):
                    peak_bytes = chain_peak_bytes(problem.chain, kind)
                    rated.append((peak_bytes, number, kind))
            except InputError:  # not an option of all blocks
                continue
        yield from (kind for *_, kind in sorted(rated)[:2])
