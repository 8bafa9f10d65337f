"""The search loop: profile, solve, trace the recipe as applied, replay it, repeat.

The solver bounds live bytes by a formula; the replay decides whether a recipe fits
(docs/decisions/0002-solvers-propose-one-judge-decides.md). Where it needs too much, the
solver's budget shrinks by the excess for the next round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.planning.judging.judge import judge
from budgetfit.planning.profiling.block_chain import BlockChain, checkpoint_every_block
from budgetfit.planning.search.every_nth_block import (
    EVERY_N_POLICY,
    every_nth,
    fastest_every_nth,
    parse_every_n,
)
from budgetfit.planning.search.over_limit_candidates import over_limit_candidates
from budgetfit.planning.search.solver_choice import (
    fastest_plan,
    fastest_plan_bounds,
    lowest_peak_nested,
)
from budgetfit.solvers.batch_size import Objective, choose_batch_size
from budgetfit.solvers.problem import Problem, Solution
from budgetfit.solvers.uniform_segments import chen_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.budget import Budget
    from budgetfit.core.recipe import Recipe
    from budgetfit.solvers.batch_size import BatchCandidate, BatchChoice

MAX_ROUNDS = 8
# The excess shrinks the next budget, by at least this much: rounding costs no round.
STEP_BYTES = 8 << 20
SMALL_SLACK = 0.02  # of the usable bytes: unused bytes not worth another round
# More unused bytes than this are worth a round between the largest limit that fit and
# the smallest that did not.
LARGE_SLACK = 0.03
MIN_ROUND_GAIN = 0.05  # of the step's time that a larger limit would save

Checkpointing = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The requested checkpointing, objective and batch size.

    ``checkpointing`` is a policy's name or block names; a ``batch_size`` of None is
    solved for.
    """

    checkpointing: Checkpointing = "auto"
    objective: Objective = "throughput"
    batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best recipe that the judge accepts, or None, and the rounds of the search."""

    estimate: Estimate | None
    explanation: str = ""
    rounds: tuple[str, ...] = ()


def solver_for(
    request: Request, blocks: Sequence[str]
) -> Callable[[Problem], Solution]:
    """Return the solver of a checkpointing policy.

    Raises:
        InputError: If a policy or a block is not known.
    """
    policy = request.checkpointing
    if policy == "auto":
        return lowest_peak_nested if request.objective == "memory" else fastest_plan
    if policy == "sqrt":
        return lambda problem: _fixed(problem, chen_segments(problem.chain))
    if policy == EVERY_N_POLICY:
        return fastest_every_nth
    segments = fixed_segments(policy, blocks)
    return lambda problem: _fixed(problem, segments)


def fixed_segments(policy: Checkpointing, blocks: Sequence[str]) -> tuple[Segment, ...]:
    """Return the segments of a fixed checkpointing policy.

    Raises:
        InputError: If the policy or one of the named blocks is not known.
    """
    if isinstance(policy, str):
        if policy in ("none", "as-is"):
            return ()
        if policy == "full":
            return checkpoint_every_block(tuple(blocks))
        n = parse_every_n(policy)
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
    block_chain: BlockChain, policy: Checkpointing, batch_size: int
) -> tuple[Segment, ...]:
    """Return the segments of a policy other than ``auto`` at a batch size.

    Raises:
        InputError: If the policy or one of the named blocks is not known.
    """
    if policy == "sqrt":
        return chen_segments(block_chain.profile_at(batch_size))
    if policy == EVERY_N_POLICY:
        policy = "every-2"  # the lowest peak of them
    return fixed_segments(policy, block_chain.traces.workload.blocks)


def _fixed(problem: Problem, segments: tuple[Segment, ...]) -> Solution:
    fits = chain_peak_bytes(problem.chain, segments) <= problem.budget_bytes
    return Solution(
        segments=segments if fits else None,
        proven_optimal=False,
        explanation="As asked for; nothing was decided",
    )


def search(
    block_chain: BlockChain,
    request: Request,
    budget: Budget,
    *,
    max_rounds: int = MAX_ROUNDS,
    known: Sequence[Estimate] = (),
) -> SearchResult:
    """Return the best recipe under the request that the judge accepts.

    First within limits for the solver, then among candidates above such a limit. At
    most ``max_rounds`` recipes are judged for the first, and where that is fewer than
    usual, for both. ``known`` are recipes known to fit: candidates that cannot be
    better are not traced. ``estimate`` is None when nothing fits, not even batch 1, or
    nothing that could be better than the known ones.
    """
    found = _within_limits(block_chain, request, budget, max_rounds, known)
    best = found.estimate
    wanted = request.checkpointing == "auto" and request.objective == "throughput"
    if best is None or not wanted:
        return found
    explanation, rounds = found.explanation, list(found.rounds)
    left = max_rounds - len(rounds) if max_rounds < MAX_ROUNDS else None
    for recipe, how in over_limit_candidates(
        block_chain, best.recipe, budget.usable_bytes, left
    ):
        estimate = judge_recipe(block_chain, recipe, budget)
        rounds.append(_verdict(estimate, budget.usable_bytes))
        if estimate.fits and _better(estimate, best, request):
            best, explanation = estimate, how
    return SearchResult(estimate=best, explanation=explanation, rounds=tuple(rounds))


def _within_limits(
    block_chain: BlockChain,
    request: Request,
    budget: Budget,
    max_rounds: int,
    known: Sequence[Estimate],
) -> SearchResult:
    """Return the best proposal of the solver under a changing limit of live bytes.

    The limit starts where the traced programs suggest; it shrinks by the excess while
    recipes do not fit, and grows by the unused bytes once one fits, until these are two
    per cent or less. Where nothing is within the first limit, the plan of lowest peak
    shows how much the allocator reserves beyond the formula.
    """
    solve = solver_for(request, block_chain.traces.workload.blocks)
    usable = budget.usable_bytes
    rounds: list[str] = []
    seen: set[Recipe] = set()
    best: tuple[Estimate, str] | None = None
    first = _roughly(block_chain, solve, request, usable)
    choices = {usable: first}
    limit = usable - _reserve_of(block_chain, first)
    if known:  # the next proposals are likely to reserve as much
        limit = min(limit, usable - max(_reserve_bytes(each) for each in known))
    limits = _Limits(usable=usable, now=limit, refused=usable + 1)
    for _ in range(max_rounds):
        chosen = _choose(block_chain, solve, request, limits.now, choices)
        if chosen is None and not seen and not known:
            chosen, limits.is_last = _lowest(block_chain, request, usable), True
        if chosen is None or any(_loses(chosen, each, request) for each in known):
            break
        recipe = block_chain.settings.recipe(
            chosen.batch_size, chosen.solution.segments or ()
        )
        if recipe in seen:
            break
        seen.add(recipe)
        estimate = judge_recipe(block_chain, recipe, budget)
        rounds.append(_round(limits.now, chosen, estimate, usable))
        if estimate.fits and (best is None or _better(estimate, best[0], request)):
            best = (estimate, chosen.solution.explanation)
        if not limits.moved(chosen, estimate, best[0] if best else None):
            break
    if best is None:
        return SearchResult(estimate=None, rounds=tuple(rounds))
    return SearchResult(estimate=best[0], explanation=best[1], rounds=tuple(rounds))


@dataclass(slots=True, kw_only=True)
class _Limits:
    """The solver's limit of live bytes, from round to round.

    Attributes:
        usable: Bytes that may be reserved.
        now: The limit of the round.
        refused: The smallest limit whose plan did not fit.
        agreed: The largest limit whose plan fits.
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
        """Move the limit after a round; return whether another round is worth it."""
        slack = self.usable - judged.reserved_bytes
        peak_bytes = chosen.peak_bytes or self.now
        if judged.fits:
            self.is_last = False
            if slack <= self.usable * SMALL_SLACK or self.now >= self.usable:
                return False
            self.agreed = max(self.now, peak_bytes)
            self.now = min(self.agreed + slack, self.usable, self.refused - 1)
            return True
        if self.is_last or slack >= 0:  # host memory is the bottleneck
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
        much = unused > self.usable * LARGE_SLACK and room > 2 * STEP_BYTES
        return much and gain > MIN_ROUND_GAIN


def _lowest(
    block_chain: BlockChain, request: Request, usable: int
) -> BatchCandidate | None:
    """Return the plan of lowest peak, at the requested batch size or 1."""
    if request.checkpointing != "auto":
        return None
    return choose_batch_size(
        block_chain.profile_at,
        lowest_peak_nested,
        budget_bytes=usable,
        objective="memory",
        effective_batch_size=block_chain.settings.effective_batch_size,
        batch_sizes=[request.batch_size or 1],
    ).best


def _reserve_bytes(estimate: Estimate) -> int:
    return estimate.reserved_bytes - estimate.allocated_bytes


def _loses(chosen: BatchCandidate, known: Estimate, request: Request) -> bool:
    """Whether a proposal cannot be better than a recipe judged already."""
    if request.objective == "batch_size":
        return chosen.batch_size < known.recipe.batch_size
    if request.objective == "memory":
        return (chosen.peak_bytes or 0) >= known.reserved_bytes
    return False


def _better(new: Estimate, old: Estimate, request: Request) -> bool:
    return rank(new, request.objective) < rank(old, request.objective)


def rank(estimate: Estimate, objective: Objective) -> tuple[float, ...]:
    """Return the sort key of an estimate under an objective: lower is better."""
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
    block_chain: BlockChain,
    solve: Callable[[Problem], Solution],
    request: Request,
    limit_bytes: int,
    choices: dict[int, BatchChoice],
) -> BatchCandidate | None:
    """Return the best batch size and its plan within a limit.

    Batch sizes are compared without ``exact_blocks``, which takes 20 times as long; the
    chosen one is then solved with it. ``choices`` are those within other limits, and
    this one is added to them.
    """
    before = min((limit for limit in choices if limit >= limit_bytes), default=None)
    larger = choices[before] if before is not None else None
    rough_choice = _roughly(block_chain, solve, request, limit_bytes, larger)
    choices[limit_bytes] = rough_choice
    rough = rough_choice.best
    if rough is None:
        return None
    exact = choose_batch_size(
        block_chain.profiles_within(limit_bytes),
        solve,
        budget_bytes=limit_bytes,
        objective=request.objective,
        effective_batch_size=block_chain.settings.effective_batch_size,
        batch_sizes=[rough.batch_size],
        micro_batches=block_chain.settings.accumulation or 1,
    ).best
    return exact or rough


def _roughly(
    block_chain: BlockChain,
    solve: Callable[[Problem], Solution],
    request: Request,
    limit_bytes: int,
    larger: BatchChoice | None = None,
) -> BatchChoice:
    """Return the choice of a batch size on profiles without ``exact_blocks``.

    ``larger`` is the choice within a larger limit.
    """
    return choose_batch_size(
        block_chain.profiles_within(limit_bytes, exact_blocks=False),
        solve,
        budget_bytes=limit_bytes,
        objective=request.objective,
        effective_batch_size=block_chain.settings.effective_batch_size,
        batch_sizes=None if request.batch_size is None else [request.batch_size],
        bounds=fastest_plan_bounds if solve is fastest_plan else None,
        before=larger,
        micro_batches=block_chain.settings.accumulation or 1,
    )


def _reserve_of(block_chain: BlockChain, choice: BatchChoice) -> int:
    """Estimate what the allocator reserves beyond live bytes.

    From the programs that are traced already; it only saves rounds.
    """
    return block_chain.reserve_bytes(choice.best.batch_size) if choice.best else 0


def judge_recipe(
    block_chain: BlockChain, recipe: Recipe, budget: Budget | None
) -> Estimate:
    """Trace a recipe as applied to a fake copy of the model and judge it by replay."""
    traces = block_chain.traces
    context_bytes = budget.context_bytes if budget is not None else 0
    return judge(
        traces.exact(recipe),
        recipe,
        traces.workload.gpu,
        budget,
        context_bytes=context_bytes,
        notes=traces.workload.notes,
    )
