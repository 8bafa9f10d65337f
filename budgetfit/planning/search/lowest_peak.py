"""What needs least of all that a plan may choose: whether any plan fits."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from budgetfit.errors import InputError, TraceError
from budgetfit.memory.chain.peak import chain_host_bytes, chain_peak_bytes
from budgetfit.planning.profiling.block_chain import Setting, every_block
from budgetfit.planning.profiling.first_trace import chains_of_each
from budgetfit.planning.search.loss_chunking import with_fewer_logits
from budgetfit.planning.search.search import judged, policy_segments
from budgetfit.planning.search.solver_choice import (
    LONGEST_SEGMENT,
    lowest_of_all,
    without_host,
)
from budgetfit.solvers.chain_dp import lowest_peak
from budgetfit.solvers.host_limit import host_holds
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.uniform_segments import every_uniform_length
from budgetfit.traces.gc_freeze import old_objects_left_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from budgetfit.core.block_profile import ChainProfile
    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.core.recipe import Recipe, Segment
    from budgetfit.planning.profiling.block_chain import Chains
    from budgetfit.planning.search.search import Request
    from budgetfit.workload.workload import Subject

# What has a little more alive may reserve less. So many are judged, and more while
# their traces are short.
ALIKE: Final = 0.01  # of the peak: the simplest come first, then what pins least
MOST_JUDGED: Final = 6
MOST_EVENTS: Final = 100_000
# A near miss is looked at longer: segments of 20 MiB come and go with little.
NEAR_MISS: Final = 0.04  # above what is usable
MOST_EVENTS_NEAR: Final = 400_000
# The loss is not cut further to save less than this share of the peak.
LEAST_SAVED: Final = 0.002
NEXT_CUT: Final = 1 / 7  # 8 to 64 parts save this share of what 1 to 8 do, or less
# The formula says at most so much more than is allocated: it is made from traces at two
# and three samples, and one sample in parts of a loss can do with fewer copies.
FORMULA_ERROR: Final = 0.2


class Least(NamedTuple):
    """The least that was found: ``estimate`` None where nothing was worth judging."""

    needed_bytes: int
    estimate: Estimate | None

    @property
    def fits(self) -> bool:
        """Whether something does."""
        return self.estimate is not None and bool(self.estimate.fits)


@old_objects_left_alone()
def least_plan(  # noqa: PLR0913 - as make_plan
    subject: Subject,
    budget: Budget,
    request: Request,
    *,
    precisions: Sequence[str],
    optimizer: str,
    effective_batch_size: int | None = None,
    optimizer_in_backward: bool = False,
    instead: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Least:
    """Return something that fits, or what would be needed.

    At the request's batch size or at batch 1; without an effective batch size, with one
    micro-batch per optimizer step. The arguments are those of ``make_plan``, which
    finds a plan wherever this fits.

    Raises:
        TraceError: If the model cannot be traced.
    """
    setting = Setting(
        precision=precisions[0],
        optimizer=optimizer,
        effective_batch_size=effective_batch_size,
        optimizer_in_backward=optimizer_in_backward,
        host_ram_bytes=budget.host_ram_bytes,
    )
    found: list[Least] = []
    for chains in chains_of_each(subject, precisions, setting, instead, progress):
        if request.checkpointing == "as-is":
            own = chains.traces.subject.own_checkpointing()
            request = replace(request, checkpointing=own)
        least = something_that_fits(chains, request, budget)
        if least.fits:
            return least
        found.append(least)
    return min(found, key=lambda each: each.needed_bytes)


def something_that_fits(chains: Chains, request: Request, budget: Budget) -> Least:
    """Return a recipe that fits, or else the least that would be needed.

    What the formula says is too large is not judged; then ``needed_bytes`` is its word,
    which knows nothing of what the allocator reserves.
    """
    usable = budget.usable_bytes
    if request.checkpointing == "auto":
        # One program, which also says what no choice of segments is below.
        recompute_all = every_block(chains.traces.subject.blocks)
        recipe = chains.setting.recipe(request.batch_size or 1, recompute_all)
        full = judged(chains, recipe, budget)
        if full.fits or full.timeline.floor_bytes > usable:
            return Least(full.reserved_bytes, full)
    rated = _lowest_by_formula(chains, request)
    hopeful = [row for row in rated if not row.is_above(usable)]
    least = _least_judged(hopeful, budget)
    if least is None:
        return Least(min(row.peak_bytes for row in rated), None)
    return Least(least.reserved_bytes, least)


def smallest(chains: Chains, request: Request, budget: Budget) -> Estimate:
    """Return the lowest judged peak at the request's batch size, or at batch 1.

    Where checkpointing is free: of what the formula finds lowest, with the loss whole
    and in parts, because the allocator may reserve less for one that is live with a
    little more. The first that fits ends the search.
    """
    least = _least_judged(_lowest_by_formula(chains, request), budget)
    assert least is not None  # noqa: S101 - nothing recomputed is always among them
    return least


class _Rated(NamedTuple):
    """A recipe, its chains, and what the formula knows of it."""

    peak_bytes: int
    host_bytes: int
    chains: Chains
    recipe: Recipe

    def is_above(self, limit_bytes: int) -> bool:
        """Whether more is needed, however wrong the formula is."""
        return self.peak_bytes > limit_bytes * (1 + FORMULA_ERROR)

    @property
    def kinds(self) -> int:
        """In how many ways blocks are treated: more leave the allocator more gaps."""
        rows = self.recipe.segments
        return len({replace(row, blocks=("",) * len(row.blocks)) for row in rows})


def _least_judged(rated: Sequence[_Rated], budget: Budget) -> Estimate | None:
    """Return the lowest judged peak, or the first that fits; None of nothing."""
    least: Estimate | None = None
    events = 0
    most_events = MOST_EVENTS
    for number, row in enumerate(rated):
        if number >= MOST_JUDGED and events > most_events:
            break
        if least is not None and row.is_above(least.reserved_bytes):
            continue
        found = judged(row.chains, row.recipe, budget)
        if found.fits:
            return found
        if least is None or found.reserved_bytes < least.reserved_bytes:
            least = found
        if least.reserved_bytes <= budget.usable_bytes * (1 + NEAR_MISS):
            most_events = MOST_EVENTS_NEAR
        events += len(row.chains.traces.exact(row.recipe).events)
    return least


def _lowest_by_formula(chains: Chains, request: Request) -> list[_Rated]:
    """Return recipes, the lowest peaks first, of about equal ones the simplest."""
    rated: list[_Rated] = []
    lowest = sys.maxsize
    size = request.batch_size or 1
    for of_one_loss in with_fewer_logits(chains, request):
        try:
            chain = of_one_loss.at(size)
        except (InputError, TraceError) as error:
            if of_one_loss is chains:
                raise
            chains.traces.log.append(f"the loss is not cut into parts: {error}")
            break
        rated += [
            _Rated(
                chain_peak_bytes(chain, segments),
                chain_host_bytes(chain, segments),
                of_one_loss,
                of_one_loss.setting.recipe(size, segments),
            )
            for segments in _segments_to_try(of_one_loss, request)
        ]
        before, lowest = lowest, min(row.peak_bytes for row in rated)
        if (before - lowest) * NEXT_CUT < LEAST_SAVED * lowest:
            break
    step = max(1, round(lowest * ALIKE))
    return sorted(
        rated, key=lambda row: (row.peak_bytes // step, row.kinds, row.host_bytes)
    )


def _segments_to_try(chains: Chains, request: Request) -> list[tuple[Segment, ...]]:
    """Return segments that may have the lowest peak, without repetitions."""
    size = request.batch_size or 1
    if request.checkpointing != "auto":
        return [policy_segments(chains, request.checkpointing, size)]
    problem = Problem(chain=chains.at(size), budget_bytes=sys.maxsize)
    on_device = replace(problem, chain=without_host(problem.chain))
    tried = [
        lowest_of_all(problem).segments,
        lowest_of_all(on_device).segments,
        lowest_peak(on_device).segments,
        *_equal_segments(problem),
        *_all_inputs_but_one_on_host(chains, problem.chain),
        *(policy_segments(chains, name, size) for name in ("none", "full")),
    ]
    return list(dict.fromkeys(each for each in tried if each is not None))


def _all_inputs_but_one_on_host(
    chains: Chains, chain: ChainProfile
) -> Iterator[tuple[Segment, ...]]:
    """Yield every block recomputed, its input on the host but for one of them.

    Where a tensor more or less is alive may save the allocator a segment of 20 MiB: 6 %
    of what a model of 50 M parameters takes. Of long traces none: too few are judged.
    """
    program = chains.recomputed(chain.batch_size)
    if program is None or len(program.trace.events) * MOST_JUDGED > MOST_EVENTS:
        return
    blocks = every_block(chains.traces.subject.blocks)
    on_host = [replace(block, input_on_host=True) for block in blocks]
    for number, block in enumerate(blocks):
        segments = (*on_host[:number], block, *on_host[number + 1 :])
        try:
            if host_holds(chain, segments):
                yield segments
        except InputError:  # not an option of all blocks
            return


def _equal_segments(problem: Problem) -> Iterator[tuple[Segment, ...]]:
    """Yield the two lengths of lowest peak of each kind of equal segments.

    The solver mixes kinds and lengths for what is live with a little less; equal ones
    leave the allocator fewer gaps.
    """
    longer = replace(problem, max_segment=LONGEST_SEGMENT)
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
