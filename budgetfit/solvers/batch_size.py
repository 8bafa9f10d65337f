"""Choose the batch size with any solver, for each of the three objectives.

A larger micro-batch spreads the optimizer step over more samples and uses the GPU
better, but leaves fewer bytes for activations, so that more is recomputed. The largest
batch is therefore not always the fastest, and each one is solved for.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.validation import MAX_BATCH_SIZE
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.batch_size_grid import (
    LARGEST_BATCH_SIZE,
    batch_size_grid,
    bisect,
    fitting_batch_sizes,
    largest_fitting_batch,
)
from budgetfit.solvers.problem import Problem, Solution, wrapped_count

Objective = Literal["throughput", "batch_size", "memory"]


class Bounds(NamedTuple):
    """Bounds on the time of a solver's plan, known without solving, in nanoseconds.

    A forward and backward pass takes at least ``lower_ns``, which is None where
    no plan exists, and at most ``upper_ns``, None where that is unknown.
    """

    lower_ns: int | None
    upper_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCandidate:
    """The solution at one batch size.

    Attributes:
        batch_size: Samples per micro-batch.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        solution: The solver's; without segments where it found no plan.
        peak_bytes: By the chain formula; None without a plan.
        ns_per_sample: Time of an optimizer step per sample; None without a plan.
    """

    batch_size: int
    gradient_accumulation_steps: int
    solution: Solution
    peak_bytes: int | None = None
    ns_per_sample: Fraction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """The best candidate, None if no batch size has a plan; and all that were solved.

    Sizes that the bounds rule out are not solved.

    Attributes:
        lower_ns: Lower bounds on the time per sample, at this budget or less.
    """

    best: BatchCandidate | None
    considered: tuple[BatchCandidate, ...]
    lower_ns: Mapping[int, Fraction] = field(default_factory=dict)


def choose_batch_size(  # noqa: PLR0913 - one value each, all needed
    profile_at: Callable[[int], ChainProfile],
    solve: Callable[[Problem], Solution],
    *,
    limit_bytes: int,
    objective: Objective = "throughput",
    effective_batch_size: int | None = None,
    batch_sizes: Sequence[int] | None = None,
    bounds: Callable[[Problem], Bounds] | None = None,
    before: BatchChoice | None = None,
    below_ns: Fraction | None = None,
    any_below: bool = False,
    micro_batches: int = 1,
    smallest: int = 1,
    largest: int = LARGEST_BATCH_SIZE,
    most: int = MAX_BATCH_SIZE,
    refused: Collection[int] = (),
) -> BatchChoice:
    """Return the best batch size for an objective, with its plan.

    ``throughput`` minimises time per sample, ``batch_size`` maximises the micro-batch,
    ``memory`` minimises the peak (pass a solver that does: ``lowest_peak``). Ties: less
    time, then the lower peak, then fewer wrapped blocks,
    then the smaller batch.

    Args:
        profile_at: Returns the chain at a batch size; with gradient accumulation,
            gradients are static bytes. Bytes must not fall as the batch grows.
        solve: Any solver.
        limit_bytes: As in ``Problem``.
        objective: What to optimise.
        effective_batch_size: Samples per optimizer step. Only its divisors are tried,
            with gradient accumulation. None: ``micro_batches`` per step.
        batch_sizes: The only ones to try, which divide the effective one; None for a
            grid.
        bounds: Bounds on the solver's plan: sizes that they rule out are not solved.
            They do not change the result. For ``throughput`` and ``batch_size``.
        before: The choice within a larger budget, all else equal: sizes that were too
            slow there are not tried again.
        below_ns: The time per sample that counts as an answer, for ``throughput``:
            sizes whose bounds are not below it are not solved.
        any_below: Whether any size below it will do, and not only the best.
        micro_batches: Per optimizer step, without an effective batch size.
        smallest: The smallest size to try, where ``batch_sizes`` names none.
        largest: The largest.
        most: The largest that the model takes; of divisors of the effective size too.
        refused: Sizes that have no plan, whatever the profile says.
    """
    search = _Search(
        profile_at,
        solve,
        limit_bytes,
        effective_batch_size,
        bounds if objective != "memory" else None,
        micro_batches,
        smallest,
        min(largest, most),
        most,
        refused,
    )
    on_grid = batch_sizes is None and effective_batch_size is None
    if any_below and on_grid and (found := search.first_below(below_ns)):
        return BatchChoice(best=found, considered=(found,))
    sizes = _sizes_to_try(search, objective, batch_sizes, before)
    _solve_the_promising(search, sizes, objective, below_ns)
    best = search.best_of(sizes, objective)
    if best and objective == "throughput" and not (batch_sizes or effective_batch_size):
        last = _last_before_the_next_step(search, best.batch_size)
        best = search.best_of([best.batch_size, last], objective)
    considered = tuple(search.seen[size] for size in sorted(search.seen))
    lower_ns = {} if bounds is None else search.floors_of(sizes)
    return BatchChoice(best=best, considered=considered, lower_ns=lower_ns)


@dataclass(frozen=True, slots=True)
class _Search:
    """Solves each batch size at most once, with cached bounds."""

    profile_at: Callable[[int], ChainProfile]
    solve: Callable[[Problem], Solution]
    limit_bytes: int
    effective_batch_size: int | None
    bounds: Callable[[Problem], Bounds] | None
    micro_batches: int
    smallest: int
    largest: int
    most: int
    refused: Collection[int]
    seen: dict[int, BatchCandidate] = field(default_factory=dict)
    known: dict[int, Bounds] = field(default_factory=dict)
    floors: dict[int, Fraction] = field(default_factory=dict)

    def fits(self, batch_size: int) -> bool:
        """Whether there is a plan at a batch size; solves only if bounds do not say."""
        if batch_size in self.refused:
            return False
        known = self.bounds_at(batch_size)
        if known is not None and known.lower_ns is None:
            return False
        if known is not None and known.upper_ns is not None:
            return True
        return self.candidate(batch_size).solution.segments is not None

    def may_fit(self, batch_size: int) -> bool:
        """Whether the bounds allow a plan; without bounds, ``fits``."""
        if batch_size in self.refused:
            return False
        known = self.bounds_at(batch_size)
        return known.lower_ns is not None if known else self.fits(batch_size)

    def fitting(self) -> list[int]:
        """Return the examined batch sizes that have a plan."""
        return [size for size in {*self.seen, *self.known} if self.fits(size)]

    def bounds_at(self, batch_size: int) -> Bounds | None:
        """Return the bounds at a batch size, if there are any."""
        if self.bounds is None:
            return None
        if batch_size not in self.known:
            self.known[batch_size] = self.bounds(self._problem(batch_size))
        return self.known[batch_size]

    def first_below(self, below_ns: Fraction | None) -> BatchCandidate | None:
        """Return a plan below a time per sample, if doubled sizes show that one is."""
        size = self.smallest
        while below_ns is not None and size <= self.largest and self.may_fit(size):
            bounds = self.bounds_at(size)
            if bounds is not None and bounds.upper_ns is not None:
                chain = self.profile_at(size)
                if self._ns_per_sample(chain, bounds.upper_ns) < below_ns:
                    return self.candidate(size)
            size *= 2
        return None

    def floor(self, batch_size: int) -> Fraction:
        """Return a lower bound on the time per sample at a batch size."""
        # No plan is faster than everything kept, whether that fits or not.
        known = self.known.get(batch_size)
        least_ns = None if known is None else known.lower_ns
        if least_ns is None and batch_size in self.floors:
            return self.floors[batch_size]
        chain = self.profile_at(batch_size)
        floor = self._ns_per_sample(chain, least_ns or chain_time_ns(chain, ()))
        self.floors[batch_size] = max(floor, self.floors.get(batch_size, floor))
        return self.floors[batch_size]

    def floors_of(self, batch_sizes: Iterable[int]) -> dict[int, Fraction]:
        """Return ``floor`` of the sizes that the bounds do not rule out."""
        return {
            size: self.floor(size)
            for size in batch_sizes
            if size not in self.known or self.may_fit(size)
        }

    def best_of(
        self, batch_sizes: Iterable[int], objective: Objective
    ) -> BatchCandidate | None:
        """Return the best solved candidate that has a plan."""
        solved = [self.seen[size] for size in batch_sizes if size in self.seen]
        rated = [(key, each) for each in solved if (key := _key(each, objective))]
        return min(rated, key=lambda pair: pair[0], default=(None, None))[1]

    def candidate(self, batch_size: int) -> BatchCandidate:
        """Solve for a batch size."""
        if batch_size not in self.seen:
            self.seen[batch_size] = self._solved(self._problem(batch_size))
        return self.seen[batch_size]

    def _problem(self, batch_size: int) -> Problem:
        chain = self.profile_at(batch_size)
        return Problem(chain=chain, limit_bytes=self.limit_bytes)

    def _solved(self, problem: Problem) -> BatchCandidate:
        chain = problem.chain
        if chain.batch_size in self.refused:
            solution = Solution(
                segments=None, proven_optimal=False, explanation="refused"
            )
        else:
            solution = self.solve(problem)
        found = solution.segments
        return BatchCandidate(
            batch_size=chain.batch_size,
            gradient_accumulation_steps=self._micro_batches(chain.batch_size),
            solution=solution,
            peak_bytes=None if found is None else chain_peak_bytes(chain, found),
            ns_per_sample=None
            if found is None
            else self._ns_per_sample(chain, chain_time_ns(chain, found)),
        )

    def _micro_batches(self, batch_size: int) -> int:
        if self.effective_batch_size is None:
            return self.micro_batches
        return self.effective_batch_size // batch_size

    def _ns_per_sample(self, chain: ChainProfile, micro_batch_ns: int) -> Fraction:
        micro_batches = self._micro_batches(chain.batch_size)
        step_ns = chain.step_ns(micro_batch_ns, micro_batches)
        return Fraction(step_ns, chain.batch_size * micro_batches)


def _sizes_to_try(
    search: _Search,
    objective: Objective,
    batch_sizes: Sequence[int] | None,
    before: BatchChoice | None,
) -> list[int]:
    """Return the batch sizes to choose from: those that may fit."""
    if batch_sizes is not None:
        return [size for size in batch_sizes if search.fits(size)]
    if search.effective_batch_size is not None:
        return _divisors_that_fit(search, search.effective_batch_size)
    if objective == "memory":
        # No larger batch has a lower peak.
        return [search.smallest] if search.fits(search.smallest) else []
    if objective == "batch_size":
        largest_fitting_batch(search.fits, search.smallest, search.largest)
        return search.fitting()
    if before is not None and before.lower_ns:
        search.floors.update(before.lower_ns)
        return sorted(before.lower_ns)
    return fitting_batch_sizes(search.may_fit, search.smallest, search.largest)


def _divisors_that_fit(search: _Search, effective_batch_size: int) -> list[int]:
    """Return the divisors in ascending order up to the first that does not fit."""
    # The whole effective batch is always tried: without accumulation gradients are
    # freed in each step, so that it may fit where a smaller batch does not.
    found = []
    for size in range(search.smallest, min(effective_batch_size, search.most + 1)):
        if effective_batch_size % size == 0:
            if not search.fits(size):
                break
            found.append(size)
    if effective_batch_size <= search.most and search.fits(effective_batch_size):
        found.append(effective_batch_size)
    return found


def _solve_the_promising(
    search: _Search,
    sizes: Sequence[int],
    objective: Objective,
    below_ns: Fraction | None,
) -> None:
    """Solve the sizes that can be the best, by ascending lower bound."""
    if search.bounds is None:
        for size in sizes:
            search.candidate(size)
        return
    if objective == "batch_size":
        for size in sorted(sizes, reverse=True):
            if search.candidate(size).solution.segments is not None:
                return
        return
    best = below_ns
    waiting = [(least, size) for size, least in search.floors_of(sizes).items()]
    heapq.heapify(waiting)
    while waiting:
        least, size = heapq.heappop(waiting)
        if best is not None and least > best:
            return
        if not search.may_fit(size):
            continue
        if search.floor(size) > least:
            heapq.heappush(waiting, (search.floor(size), size))
            continue
        found = search.candidate(size).ns_per_sample
        best = min((ns for ns in (best, found) if ns is not None), default=None)


def _last_before_the_next_step(search: _Search, best: int) -> int:
    """Return the largest size that fits below the next grid point, if that does not."""
    # Else the best one itself: larger ones fit, and are slower.
    following = next(size for size in batch_size_grid(4 * best + 16) if size > best)
    if following > search.largest or following == best + 1 or search.fits(following):
        return best
    last = bisect(search.fits, best, following)
    search.candidate(last)
    return last


def _key(candidate: BatchCandidate, objective: Objective) -> tuple[Any, ...]:
    """Return the sort key of a candidate, lower is better; empty without a plan."""
    if candidate.solution.segments is None:
        return ()
    size = candidate.batch_size
    time, peak = candidate.ns_per_sample, candidate.peak_bytes
    wrapped = wrapped_count(candidate.solution.segments)
    return {
        "throughput": (time, peak, wrapped, size),
        "batch_size": (-size, time, peak, wrapped),
        "memory": (peak, time, wrapped, size),
    }[objective]
