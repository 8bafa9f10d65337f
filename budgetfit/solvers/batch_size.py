"""Which batch size: around any solver, for each of the three objectives.

A larger micro-batch spreads the optimizer step over more samples and keeps the card
busier, but leaves fewer bytes for activations, so that more is recomputed. The largest
batch is therefore not always the fastest (solver S6), and each one is solved for.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from budgetfit.core.block_profile import ChainProfile
from budgetfit.errors import InputError
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.batch_size_grid import bisect, fitting_ladder, ladder, largest
from budgetfit.solvers.problem import Problem, Solution, wrapped_count

Objective = Literal["throughput", "batch_size", "memory"]


class Bounds(NamedTuple):
    """What is known of a solver's answer without asking it, in nanoseconds.

    A forward and backward pass takes no less than ``least_ns``, which is None where
    there surely is no plan, and no more than ``most_ns``, None where that is not known.
    """

    least_ns: int | None
    most_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCandidate:
    """What became of one batch size.

    Attributes:
        batch_size: Samples per micro-batch.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        solution: The solver's answer; without segments where it found no plan.
        peak_bytes: By the chain formula, which is for the search only; None without a
            plan.
        ns_per_sample: A whole step's time over its samples; None without a plan.
    """

    batch_size: int
    gradient_accumulation_steps: int
    solution: Solution
    peak_bytes: int | None = None
    ns_per_sample: Fraction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """The best candidate, None if there is no plan for any; and all that were solved.

    Where bounds are given, sizes that they rule out are not among those.

    Attributes:
        least_ns: What the time per sample cannot be below, at this budget or less.
    """

    best: BatchCandidate | None
    considered: tuple[BatchCandidate, ...]
    least_ns: Mapping[int, Fraction] = field(default_factory=dict)


def choose_batch_size(  # noqa: PLR0913 - one value each, all needed
    profile_at: Callable[[int], ChainProfile],
    solve: Callable[[Problem], Solution],
    *,
    budget_bytes: int,
    objective: Objective = "throughput",
    effective_batch_size: int | None = None,
    batch_sizes: Sequence[int] | None = None,
    max_segment: int | None = None,
    nested: bool = False,
    bounds: Callable[[Problem], Bounds] | None = None,
    before: BatchChoice | None = None,
    micro_batches: int = 1,
) -> BatchChoice:
    """Return the batch size that serves the objective best, with its plan.

    ``throughput`` takes the least time per sample, ``batch_size`` the largest
    micro-batch, ``memory`` the lowest peak (give it a solver that looks for that:
    ``lowest_peak``). Ties: less time, then the lower peak, then fewer wrapped blocks,
    then the smaller batch.

    Args:
        profile_at: The chain at a batch size; where micro-batches are accumulated, with
            gradients among the static bytes (rule C3). Bytes must not fall as the batch
            grows.
        solve: Any solver.
        budget_bytes: As in ``Problem``.
        objective: What to look for.
        effective_batch_size: Samples per optimizer step. Only its divisors are tried,
            the rest is gradient accumulation. None: ``micro_batches`` per step.
        batch_sizes: The only ones to try; None for all that make sense.
        max_segment: As in ``Problem``.
        nested: As in ``Problem``.
        bounds: What is known of the solver's answer: what they rule out is not solved.
            They do not change what is best. For ``throughput`` and ``batch_size``.
        before: What was chosen within a larger budget, all else the same: sizes that
            were too slow there are not looked at again.
        micro_batches: Per optimizer step, where there is no effective batch size.

    Raises:
        InputError: A batch size below 1, or one that does not divide the effective one.
    """
    _check(effective_batch_size, batch_sizes)
    search = _Search(
        profile_at,
        solve,
        budget_bytes,
        effective_batch_size,
        max_segment,
        nested,
        bounds if objective != "memory" else None,
        micro_batches,
    )
    sizes = _sizes_to_try(search, objective, batch_sizes, before)
    _solve_the_promising(search, sizes, objective)
    best = search.best_of(sizes, objective)
    if best and objective == "throughput" and not (batch_sizes or effective_batch_size):
        last = _last_before_the_next_step(search, best.batch_size)
        best = search.best_of([best.batch_size, last], objective)
    considered = tuple(search.seen[size] for size in sorted(search.seen))
    least_ns = {} if bounds is None else search.floors_of(sizes)
    return BatchChoice(best=best, considered=considered, least_ns=least_ns)


@dataclass(frozen=True, slots=True)
class _Search:
    """Solves each batch size at most once."""

    profile_at: Callable[[int], ChainProfile]
    solve: Callable[[Problem], Solution]
    budget_bytes: int
    effective_batch_size: int | None
    max_segment: int | None
    nested: bool
    bounds: Callable[[Problem], Bounds] | None
    micro_batches: int
    seen: dict[int, BatchCandidate] = field(default_factory=dict)
    known: dict[int, Bounds] = field(default_factory=dict)
    floors: dict[int, Fraction] = field(default_factory=dict)

    def fits(self, batch_size: int) -> bool:
        """Say whether there is a plan for a batch size; solve only where it must be."""
        known = self.bounds_at(batch_size)
        if known is not None and known.least_ns is None:
            return False
        if known is not None and known.most_ns is not None:
            return True
        return self.candidate(batch_size).solution.segments is not None

    def may_fit(self, batch_size: int) -> bool:
        """Say whether nothing known rules out a plan; without bounds, ``fits``."""
        known = self.bounds_at(batch_size)
        return known.least_ns is not None if known else self.fits(batch_size)

    def fitting(self) -> list[int]:
        """Return the batch sizes that were asked for and have a plan."""
        return [size for size in {*self.seen, *self.known} if self.fits(size)]

    def bounds_at(self, batch_size: int) -> Bounds | None:
        """Return the bounds at a batch size, if there are any."""
        if self.bounds is None:
            return None
        if batch_size not in self.known:
            self.known[batch_size] = self.bounds(self._problem(batch_size))
        return self.known[batch_size]

    def floor(self, batch_size: int) -> Fraction:
        """Return a time per sample that no candidate is below; bounds improve it."""
        before = self.floors.get(batch_size, Fraction(0))
        known = self.known.get(batch_size)
        if known is None or known.least_ns is None:
            return before
        chain = self.profile_at(batch_size)
        return max(before, self._ns_per_sample(chain, known.least_ns))

    def floors_of(self, batch_sizes: Iterable[int]) -> dict[int, Fraction]:
        """Return ``floor`` of those sizes that nothing known rules out."""
        return {
            size: self.floor(size)
            for size in batch_sizes
            if size not in self.known or self.may_fit(size)
        }

    def best_of(
        self, batch_sizes: Iterable[int], objective: Objective
    ) -> BatchCandidate | None:
        """Return the best of those that were solved and have a plan."""
        solved = [self.seen[size] for size in batch_sizes if size in self.seen]
        rated = [(key, each) for each in solved if (key := _key(each, objective))]
        return min(rated, key=lambda pair: pair[0], default=(None, None))[1]

    def candidate(self, batch_size: int) -> BatchCandidate:
        """Solve for a batch size."""
        if batch_size not in self.seen:
            self.seen[batch_size] = self._solved(self._problem(batch_size))
        return self.seen[batch_size]

    def _problem(self, batch_size: int) -> Problem:
        return Problem(
            chain=self.profile_at(batch_size),
            budget_bytes=self.budget_bytes,
            max_segment=self.max_segment,
            nested=self.nested,
        )

    def _solved(self, problem: Problem) -> BatchCandidate:
        chain = problem.chain
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
        step_ns = micro_batch_ns * micro_batches + chain.optimizer_ns
        return Fraction(step_ns, chain.batch_size * micro_batches)


def _sizes_to_try(
    search: _Search,
    objective: Objective,
    batch_sizes: Sequence[int] | None,
    before: BatchChoice | None,
) -> list[int]:
    """Return the sizes to choose among: as few as what is known allows."""
    if batch_sizes is not None:
        return [size for size in batch_sizes if search.fits(size)]
    if search.effective_batch_size is not None:
        return _divisors_that_fit(search, search.effective_batch_size)
    if objective == "memory":
        # No larger batch has a lower peak (memory-model D3).
        return [1] if search.fits(1) else []
    if objective == "batch_size":
        largest(search.fits)
        return search.fitting()
    if before is not None and before.least_ns:
        search.floors.update(before.least_ns)
        return sorted(before.least_ns)
    return fitting_ladder(search.may_fit)


def _divisors_that_fit(search: _Search, effective_batch_size: int) -> list[int]:
    """Return the divisors in ascending order up to the first that does not fit.

    The whole effective batch is tried in any case: without accumulation gradients come
    and go during the backward pass, so it may fit where a smaller batch does not.
    """
    found = []
    for size in range(1, effective_batch_size):
        if effective_batch_size % size == 0:
            if not search.fits(size):
                break
            found.append(size)
    if search.fits(effective_batch_size):
        found.append(effective_batch_size)
    return found


def _solve_the_promising(
    search: _Search, sizes: Sequence[int], objective: Objective
) -> None:
    """Solve for those sizes that can be the best, the most promising first."""
    if search.bounds is None:
        for size in sizes:
            search.candidate(size)
        return
    if objective == "batch_size":
        for size in sorted(sizes, reverse=True):
            if search.candidate(size).solution.segments is not None:
                return
        return
    best: Fraction | None = None
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
    """Return the largest size that fits, where the next of the ladder does not.

    Else the best one itself: larger ones fit, and are slower.
    """
    following = next(size for size in ladder(4 * best + 16) if size > best)
    if following == best + 1 or search.fits(following):
        return best
    last = bisect(search.fits, best, following)
    search.candidate(last)
    return last


def _key(candidate: BatchCandidate, objective: Objective) -> tuple[Any, ...]:
    """Return what to minimise; empty without a plan."""
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


def _check(effective_batch_size: int | None, batch_sizes: Sequence[int] | None) -> None:
    """Refuse sizes that no training step can have."""
    for name, size in [
        ("effective_batch_size", effective_batch_size),
        *(("batch_size", size) for size in batch_sizes or ()),
    ]:
        if size is not None and size < 1:
            raise InputError(f"{name} must be at least 1, for example 8; got {size}.")
    for size in batch_sizes or ():
        if effective_batch_size is not None and effective_batch_size % size:
            near = max(
                each for each in range(1, size) if effective_batch_size % each == 0
            )
            raise InputError(
                f"batch_size {size} does not divide effective_batch_size "
                f"{effective_batch_size}. The next smaller one that does is {near}."
            )
