"""The loop that ends with a judged recipe: profile, solve, trace as applied, replay.

The solver bounds live bytes by a formula; what fits is for the replay of the recipe as
it is applied to say (architecture rule 1). Where the judge finds too much, the solver's
budget shrinks by the excess and the loop goes round again (solver S7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.planning.judging.judge import judge
from budgetfit.planning.profiling.block_chain import Chains, every_block
from budgetfit.planning.search.every_nth_block import (
    SOLVED,
    every_nth,
    fastest_every_nth,
    number_of,
)
from budgetfit.planning.search.over_limit_candidates import near_misses
from budgetfit.planning.search.solver_choice import (
    bounds_of_fastest,
    fastest,
    lowest_of_all,
)
from budgetfit.solvers.batch_size import Objective, choose_batch_size
from budgetfit.solvers.problem import Problem, Solution
from budgetfit.solvers.uniform_segments import chen_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.recipe import Recipe
    from budgetfit.solvers.batch_size import BatchCandidate, BatchChoice

MOST_ROUNDS = 8
# The excess shrinks the next budget; a little more keeps rounding from eating a round.
STEP_BYTES = 8 << 20
LEFT_OVER = 0.02  # of the usable bytes: not worth another round
# More than this left over is worth a round between a limit that was too small and one
# that was too large.
MUCH_LEFT_OVER = 0.03
WORTH_A_ROUND = 0.05  # of the step's time, that a larger limit would have gained

Checkpointing = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user asked for, beyond the subject and the budget.

    ``checkpointing`` is a policy's name or block names; a ``batch_size`` of None is
    solved for.
    """

    checkpointing: Checkpointing = "auto"
    objective: Objective = "throughput"
    batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A recipe that the judge let pass, or None, and how the search went."""

    estimate: Estimate | None
    explanation: str = ""
    rounds: tuple[str, ...] = ()


def solver_for(
    request: Request, blocks: Sequence[str]
) -> Callable[[Problem], Solution]:
    """Return what decides on segments under a checkpointing policy.

    Raises:
        InputError: If a policy or a block is not known.
    """
    policy = request.checkpointing
    if policy == "auto":
        return lowest_of_all if request.objective == "memory" else fastest
    if policy == "sqrt":
        return lambda problem: _fixed(problem, chen_segments(problem.chain))
    if policy == SOLVED:
        return fastest_every_nth
    segments = fixed_segments(policy, blocks)
    return lambda problem: _fixed(problem, segments)


def fixed_segments(policy: Checkpointing, blocks: Sequence[str]) -> tuple[Segment, ...]:
    """Return the segments of a policy that needs no solving.

    Raises:
        InputError: If the policy or one of the named blocks is not known.
    """
    if isinstance(policy, str):
        if policy in ("none", "as-is"):
            return ()
        if policy == "full":
            return every_block(tuple(blocks))
        n = number_of(policy)
        if n is not None:
            return every_nth(blocks, n)
        raise InputError(
            f"{policy!r} is not a checkpointing policy. Use one of: auto, none, full, "
            "every-2 (every second block; any number), sqrt, as-is, or a list of block "
            'names such as ["model.layers.0"].'
        )
    unknown = [name for name in policy if name not in blocks]
    if unknown:
        known = ", ".join(blocks[:3]) or "none"
        raise InputError(
            f"{unknown[0]!r} is not a block of this model. Its blocks are {known} ..."
            if len(blocks) > 3  # noqa: PLR2004 - as many as are shown
            else f"{unknown[0]!r} is not a block of this model. Its blocks: {known}."
        )
    return tuple(Segment((name,)) for name in blocks if name in policy)


def policy_segments(
    chains: Chains, policy: Checkpointing, batch_size: int
) -> tuple[Segment, ...]:
    """Return what a policy other than ``auto`` recomputes at a batch size.

    Raises:
        InputError: If the policy or one of the named blocks is not known.
    """
    if policy == "sqrt":
        return chen_segments(chains.at(batch_size))
    if policy == SOLVED:
        policy = "every-2"  # which needs the least
    return fixed_segments(policy, chains.traces.subject.blocks)


def _fixed(problem: Problem, segments: tuple[Segment, ...]) -> Solution:
    fits = chain_peak_bytes(problem.chain, segments) <= problem.budget_bytes
    return Solution(
        segments=segments if fits else None,
        proven_optimal=False,
        explanation="As asked for; nothing was decided",
    )


def search(
    chains: Chains,
    request: Request,
    budget: Budget,
    *,
    most_rounds: int = MOST_ROUNDS,
    known: Sequence[Estimate] = (),
) -> Found:
    """Return the best recipe under the request that the judge lets pass.

    First within limits for the solver, then among those that such a limit leaves out.
    At most ``most_rounds`` recipes are judged for the first, and where that is fewer
    than usual, for both. ``known`` are recipes that are known to fit: what cannot be
    better than them is not traced. ``estimate`` is None when nothing fits, not
    even batch 1, or nothing that could be better than what is known.
    """
    found = _within_limits(chains, request, budget, most_rounds, known)
    best = found.estimate
    wanted = request.checkpointing == "auto" and request.objective == "throughput"
    if best is None or not wanted:
        return found
    explanation, rounds = found.explanation, list(found.rounds)
    left = most_rounds - len(rounds) if most_rounds < MOST_ROUNDS else None
    for recipe, how in near_misses(chains, best.recipe, budget.usable_bytes, left):
        estimate = judged(chains, recipe, budget)
        rounds.append(_verdict(estimate, budget.usable_bytes))
        if estimate.fits and _better(estimate, best, request):
            best, explanation = estimate, how
    return Found(estimate=best, explanation=explanation, rounds=tuple(rounds))


def _within_limits(
    chains: Chains,
    request: Request,
    budget: Budget,
    most_rounds: int,
    known: Sequence[Estimate],
) -> Found:
    """Return the best of what the solver proposes within limits of live bytes.

    The limit starts where the traced programs suggest; it shrinks by the excess while
    the judge refuses, and grows by what was left over after he agreed, until two per
    cent or less are. Where nothing is within the first limit, the plan of lowest peak
    tells how much the allocator really reserves beyond the formula.
    """
    solve = solver_for(request, chains.traces.subject.blocks)
    usable = budget.usable_bytes
    rounds: list[str] = []
    seen: set[Recipe] = set()
    best: tuple[Estimate, str] | None = None
    first = _roughly(chains, solve, request, usable)
    choices = {usable: first}
    limit = usable - _reserve_of(chains, first)
    if known:  # those that the solver proposes now are likely to reserve as much
        limit = min(limit, usable - max(_reserve_bytes(each) for each in known))
    limits = _Limits(usable=usable, now=limit, refused=usable + 1)
    for _ in range(most_rounds):
        chosen = _choose(chains, solve, request, limits.now, choices)
        if chosen is None and not seen and not known:
            chosen, limits.is_last = _lowest(chains, request, usable), True
        if chosen is None or any(_loses(chosen, each, request) for each in known):
            break
        recipe = chains.setting.recipe(
            chosen.batch_size, chosen.solution.segments or ()
        )
        if recipe in seen:
            break
        seen.add(recipe)
        estimate = judged(chains, recipe, budget)
        rounds.append(_round(limits.now, chosen, estimate, usable))
        if estimate.fits and (best is None or _better(estimate, best[0], request)):
            best = (estimate, chosen.solution.explanation)
        if not limits.moved(chosen, estimate, best[0] if best else None):
            break
    if best is None:
        return Found(estimate=None, rounds=tuple(rounds))
    return Found(estimate=best[0], explanation=best[1], rounds=tuple(rounds))


@dataclass(slots=True, kw_only=True)
class _Limits:
    """The limit of live bytes that the solver is given, from round to round.

    Attributes:
        usable: Bytes that may be reserved.
        now: The limit of the round.
        refused: The smallest limit whose plan was too much.
        agreed: The largest whose plan fits.
        is_last: Whether there is no smaller limit to try.
    """

    usable: int
    now: int
    refused: int
    agreed: int = 0
    is_last: bool = False

    def moved(
        self, chosen: BatchCandidate, judged: Estimate, best: Estimate | None
    ) -> bool:
        """Move the limit after a round; return whether another one is worth it."""
        slack = self.usable - judged.reserved_bytes
        peak_bytes = chosen.peak_bytes or self.now
        if judged.fits:
            self.is_last = False
            if slack <= self.usable * LEFT_OVER or self.now >= self.usable:
                return False
            self.agreed = max(self.now, peak_bytes)
            self.now = min(self.agreed + slack, self.usable, self.refused - 1)
            return True
        if self.is_last or slack >= 0:  # it is the host's memory that is too small
            return False
        self.refused = self.now
        if best is None:
            below = min(self.now, peak_bytes)
            self.now = min(below + slack, self.now - STEP_BYTES)
            return True
        unused = self.usable - best.reserved_bytes
        room = self.refused - self.agreed
        self.now = self.agreed + room // 2
        best_ns = 1e9 / (best.samples_per_s * best.time_factor)
        gain = 1 - float(chosen.ns_per_sample or 0) / best_ns
        much = unused > self.usable * MUCH_LEFT_OVER and room > 2 * STEP_BYTES
        return much and gain > WORTH_A_ROUND


def _lowest(chains: Chains, request: Request, usable: int) -> BatchCandidate | None:
    """Return the plan of lowest peak, at the batch size that was asked for or one."""
    if request.checkpointing != "auto":
        return None
    return choose_batch_size(
        chains.at,
        lowest_of_all,
        budget_bytes=usable,
        objective="memory",
        effective_batch_size=chains.setting.effective_batch_size,
        batch_sizes=[request.batch_size or 1],
    ).best


def _reserve_bytes(estimate: Estimate) -> int:
    return estimate.reserved_bytes - estimate.allocated_bytes


def _loses(chosen: BatchCandidate, known: Estimate, request: Request) -> bool:
    """Whether a proposal cannot come out ahead of what was judged already."""
    if request.objective == "batch_size":
        return chosen.batch_size < known.recipe.batch_size
    if request.objective == "memory":
        return (chosen.peak_bytes or 0) >= known.reserved_bytes
    return False


def _better(new: Estimate, old: Estimate, request: Request) -> bool:
    return rank(new, request.objective) < rank(old, request.objective)


def rank(estimate: Estimate, objective: Objective) -> tuple[float, ...]:
    """Return what to minimise for an objective."""
    recipe = estimate.recipe
    per_sample = estimate.step_ms / recipe.effective_batch_size
    return {
        "throughput": (per_sample, estimate.reserved_bytes),
        "batch_size": (-recipe.batch_size, per_sample),
        "memory": (estimate.reserved_bytes, per_sample),
    }[objective]


def _round(
    limit_bytes: int, chosen: BatchCandidate, estimate: Estimate, usable_bytes: int
) -> str:
    return (
        f"solved within {limit_bytes} bytes: formula {chosen.peak_bytes}; "
        f"{_verdict(estimate, usable_bytes)}"
    )


def _verdict(estimate: Estimate, usable_bytes: int) -> str:
    recipe = estimate.recipe
    verdict = "fits" if estimate.fits else "does not fit"
    return (
        f"batch {recipe.batch_size}, {len(recipe.wrapped_blocks)} blocks not simply "
        f"kept: replay allocated {estimate.allocated_bytes}, reserved "
        f"{estimate.reserved_bytes}: {verdict} in {usable_bytes}"
    )


def _choose(
    chains: Chains,
    solve: Callable[[Problem], Solution],
    request: Request,
    limit_bytes: int,
    choices: dict[int, BatchChoice],
) -> BatchCandidate | None:
    """Return the best batch size and its plan within a limit.

    Batch sizes are compared on chains without the allocator's tails, which take 20
    times as long; the chosen one is then solved with them. ``choices`` are those within
    other limits, and this one is added to them.
    """
    before = min((limit for limit in choices if limit >= limit_bytes), default=None)
    larger = choices[before] if before is not None else None
    rough_choice = _roughly(chains, solve, request, limit_bytes, larger)
    choices[limit_bytes] = rough_choice
    rough = rough_choice.best
    if rough is None:
        return None
    exact = choose_batch_size(
        chains.within(limit_bytes),
        solve,
        budget_bytes=limit_bytes,
        objective=request.objective,
        effective_batch_size=chains.setting.effective_batch_size,
        batch_sizes=[rough.batch_size],
        micro_batches=chains.setting.accumulation or 1,
    ).best
    return exact or rough


def _roughly(
    chains: Chains,
    solve: Callable[[Problem], Solution],
    request: Request,
    limit_bytes: int,
    larger: BatchChoice | None = None,
) -> BatchChoice:
    """Return the choice of a batch size on chains without the allocator's tails.

    ``larger`` is the choice within a larger limit.
    """
    return choose_batch_size(
        chains.within(limit_bytes, tails=False),
        solve,
        budget_bytes=limit_bytes,
        objective=request.objective,
        effective_batch_size=chains.setting.effective_batch_size,
        batch_sizes=None if request.batch_size is None else [request.batch_size],
        bounds=bounds_of_fastest if solve is fastest else None,
        before=larger,
        micro_batches=chains.setting.accumulation or 1,
    )


def _reserve_of(chains: Chains, choice: BatchChoice) -> int:
    """Leave room for what the allocator reserves beyond live bytes.

    Guessed from the programs that are traced already; saves rounds, decides nothing.
    """
    return chains.reserve_bytes(choice.best.batch_size) if choice.best else 0


def judged(chains: Chains, recipe: Recipe, budget: Budget | None) -> Estimate:
    """Apply a recipe to a fake copy, trace it and let the replay judge it."""
    traces = chains.traces
    context_bytes = budget.context_bytes if budget is not None else 0
    return judge(
        traces.exact(recipe),
        recipe,
        traces.subject.gpu,
        budget,
        context_bytes=context_bytes,
        notes=traces.subject.notes,
    )
