"""Which batch size: around any solver, for each of the three objectives.

A larger micro-batch spreads the optimizer step over more samples and keeps the card
busier, but leaves fewer bytes for activations, so that more is recomputed. The largest
batch is therefore not always the fastest (solver S6), and each one is solved for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, Literal

from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.errors import InputError
from budgetfit.memory.chain_peak import chain_peak_bytes, chain_time_ns
from budgetfit.solvers.problem import Problem, Solution, wrapped_count

Objective = Literal["throughput", "batch_size", "memory"]

# Where nothing else ends the search; the time per sample has long been flat by then.
LARGEST_BATCH_SIZE: Final = 65_536
# Multiples of 8 are tried up to here, then multiples of 16 up to twice as much, and so
# on: eight between a power of two and the next.
_EVERY_EIGHT_UP_TO: Final = 128


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
    """The best candidate, None if there is no plan for any; and all that were tried."""

    best: BatchCandidate | None
    considered: tuple[BatchCandidate, ...]


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
            the rest is gradient accumulation. None: one micro-batch per step.
        batch_sizes: The only ones to try; None for all that make sense.
        max_segment: As in ``Problem``.
        nested: As in ``Problem``.

    Raises:
        InputError: A batch size below 1, or one that does not divide the effective one.
    """
    _check(effective_batch_size, batch_sizes)
    search = _Search(
        profile_at, solve, budget_bytes, effective_batch_size, max_segment, nested
    )
    if batch_sizes is not None:
        for batch_size in batch_sizes:
            search.fits(batch_size)
    elif effective_batch_size is not None:
        _try_divisors(search, effective_batch_size)
    elif objective == "memory":
        search.fits(1)  # no larger batch has a lower peak (memory-model D3)
    else:
        largest = _largest_that_fits(search)
        for batch_size in _ladder(largest) if objective == "throughput" else ():
            search.fits(batch_size)
    considered = tuple(search.seen[size] for size in sorted(search.seen))
    rated = [(key, each) for each in considered if (key := _key(each, objective))]
    best = min(rated, key=lambda pair: pair[0], default=(None, None))[1]
    return BatchChoice(best=best, considered=considered)


@dataclass(frozen=True, slots=True)
class _Search:
    """Solves each batch size once."""

    profile_at: Callable[[int], ChainProfile]
    solve: Callable[[Problem], Solution]
    budget_bytes: int
    effective_batch_size: int | None
    max_segment: int | None
    nested: bool
    seen: dict[int, BatchCandidate] = field(default_factory=dict)

    def fits(self, batch_size: int) -> bool:
        """Solve for a batch size and say whether there is a plan."""
        if batch_size not in self.seen:
            self.seen[batch_size] = self._candidate(batch_size)
        return self.seen[batch_size].solution.segments is not None

    def _candidate(self, batch_size: int) -> BatchCandidate:
        chain = self.profile_at(batch_size)
        solution = self.solve(
            Problem(
                chain=chain,
                budget_bytes=self.budget_bytes,
                max_segment=self.max_segment,
                nested=self.nested,
            )
        )
        micro_batches = (self.effective_batch_size or batch_size) // batch_size
        if solution.segments is None:
            return BatchCandidate(
                batch_size=batch_size,
                gradient_accumulation_steps=micro_batches,
                solution=solution,
            )
        step_ns = (
            chain_time_ns(chain, solution.segments) * micro_batches + chain.optimizer_ns
        )
        return BatchCandidate(
            batch_size=batch_size,
            gradient_accumulation_steps=micro_batches,
            solution=solution,
            peak_bytes=chain_peak_bytes(chain, solution.segments),
            ns_per_sample=Fraction(step_ns, batch_size * micro_batches),
        )


def _try_divisors(search: _Search, effective_batch_size: int) -> None:
    """Try the divisors in ascending order up to the first that does not fit.

    The whole effective batch is tried in any case: without accumulation gradients come
    and go during the backward pass, so it may fit where a smaller batch does not.
    """
    divisors = (
        size
        for size in range(1, effective_batch_size)
        if effective_batch_size % size == 0
    )
    for size in divisors:
        if not search.fits(size):
            break
    search.fits(effective_batch_size)


def _largest_that_fits(search: _Search) -> int:
    """Return the largest batch size with a plan, 0 without any: doubling, bisection."""
    fitting, failing = 0, 1
    while failing <= LARGEST_BATCH_SIZE and search.fits(failing):
        fitting, failing = failing, failing * 2
    if failing > LARGEST_BATCH_SIZE:
        return fitting
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if search.fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


def _ladder(largest: int) -> list[int]:
    """Return the batch sizes worth comparing: up to 8 all, then multiples of 8."""
    sizes = list(range(1, min(8, largest) + 1))
    size, stride, stride_ends = 16, 8, _EVERY_EIGHT_UP_TO
    while size <= largest:
        sizes.append(size)
        if size == stride_ends:
            stride, stride_ends = stride * 2, stride_ends * 2
        size += stride
    return sizes


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
