"""The best batch of a fixed checkpointing, by the judge alone.

The formula leaves room for the unknown; what a plan is compared with must not suffer
from that. Fixed segments are one program, traced once for all batch sizes, so that each
batch size can be replayed.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.memory.replay import kernel_card, replay
from budgetfit.planning.judging.judge import step_ms
from budgetfit.planning.profiling.block_chain import Chains
from budgetfit.planning.search.every_nth_block import SOLVED
from budgetfit.planning.search.largest_batch import largest_up_to, live_bound
from budgetfit.planning.search.search import (
    Request,
    judged,
    policy_segments,
    rank,
    search,
)
from budgetfit.solvers.batch_size import choose_batch_size
from budgetfit.solvers.problem import Problem, Solution

if TYPE_CHECKING:
    from budgetfit.core.budget import Budget
    from budgetfit.core.plan import Estimate
    from budgetfit.core.recipe import Segment

PRACTICES: Final = (
    ("everything kept", "none"),
    ("every block recomputed", "full"),
    ("Chen's sqrt(n) segments", "sqrt"),
)
EVERY_NTH: Final = ("every n-th block recomputed", SOLVED)  # decides nothing
TRIES: Final = 3  # batch sizes that the judge may refuse after they were found to fit
_NOTHING: Final = BlockOption(
    mode="keep", saved_bytes=0, forward_bytes=0, backward_bytes=0
)


def best_of_policy(
    chains: Chains, policy: str | tuple[str, ...], request: Request, budget: Budget
) -> Estimate:
    """Return a policy at its best batch size; where nothing fits, at the smallest.

    The loss is in one piece, as those who checkpoint by a policy have it. Chen's long
    segments leave little that repeats: their batch is chosen by the formula, so that
    they are traced once. So is that of every n-th block, together with n.

    Args:
        chains: Of the setting.
        policy: As in ``Request.checkpointing``, but for ``auto``.
        request: The objective, and the batch size if it is given.
        budget: What it has to fit into.

    Raises:
        InputError: If the policy or one of the named blocks is not known.
    """
    plain = Chains(chains.traces, replace(chains.setting, loss_chunks=1), frozenset())
    if policy in ("sqrt", SOLVED):
        asked = replace(request, checkpointing=policy)
        for rounds in (1, TRIES):
            found = search(plain, asked, budget, most_rounds=rounds).estimate
            if found is not None:
                return found
    segments = policy_segments(plain, policy, request.batch_size or 1)
    return best_batch(plain, segments, request, budget)


def best_batch(
    chains: Chains, segments: tuple[Segment, ...], request: Request, budget: Budget
) -> Estimate:
    """Return fixed segments at their best batch size; where none fits, the smallest.

    Two traces, and one more of the chosen batch where that is a program of its own.
    """
    batches = Batches(chains, segments, budget)
    for _ in range(TRIES):
        best = choose_batch_size(
            batches.profile_at,
            batches.solve,
            budget_bytes=sys.maxsize,
            objective=request.objective,
            effective_batch_size=chains.setting.effective_batch_size,
            batch_sizes=None if request.batch_size is None else [request.batch_size],
            micro_batches=chains.setting.accumulation or 1,
        ).best
        if best is None:
            break
        recipe = chains.setting.recipe(best.batch_size, segments)
        estimate = judged(chains, recipe, budget)
        if estimate.fits:
            return estimate
        batches.refused.add(best.batch_size)
    smallest = chains.setting.recipe(request.batch_size or 1, segments)
    return judged(chains, smallest, budget)


class Batches:
    """Answers batch sizes as a chain and its solver would, from one program.

    The whole effective batch in one is another program, without lasting gradients; it
    is taken to need what it would with them. The judge has the last word.
    """

    def __init__(
        self, chains: Chains, segments: tuple[Segment, ...], budget: Budget
    ) -> None:
        self._traces = chains.traces
        effective = chains.setting.effective_batch_size
        accumulation = 1 if effective in {None, 1} else 2
        self._recipe = replace(
            chains.setting.recipe(2, segments),
            gradient_accumulation_steps=chains.setting.accumulation or accumulation,
        )
        self._usable_bytes = budget.usable_bytes
        self._largest: int | None = None
        self._seen: dict[int, bool] = {}
        self.refused: set[int] = set()

    def profile_at(self, batch_size: int) -> ChainProfile:
        """Return a chain of one block that takes as long as the whole micro-batch."""
        recipe = replace(self._recipe, batch_size=batch_size)
        gpu, trace = self._traces.subject.gpu, self._traces.of(recipe)
        # An optimizer in backward takes no second micro-batch: this is arithmetic.
        timed = replace(recipe, optimizer_in_backward=False)
        one, two = (
            step_ms(trace, replace(timed, gradient_accumulation_steps=steps), gpu)
            for steps in (1, 2)
        )
        block = BlockProfile(
            name="all",
            options=(_NOTHING,),
            gradient_bytes=0,
            output_bytes=0,
            forward_ns=round(1e6 * (two - one)),
            backward_ns=0,
        )
        return ChainProfile(
            batch_size=batch_size,
            static_bytes=batch_size,  # no larger batch needs less
            input_bytes=0,
            optimizer_bytes=0,
            optimizer_ns=round(1e6 * (2 * one - two)),
            blocks=(block,),
        )

    def solve(self, problem: Problem) -> Solution:
        """Say whether a batch size fits by its replay."""
        size = problem.chain.batch_size
        return Solution(
            segments=() if size not in self.refused and self._fits(size) else None,
            proven_optimal=False,
            explanation="replayed",
        )

    def _fits(self, size: int) -> bool:
        """Look for the largest batch that fits first: no smaller one needs more."""
        trace = self._traces.of(replace(self._recipe, batch_size=size))
        if len(trace.batch_sizes) == 1:
            return self._replayed(size)
        if self._largest is None:
            card = kernel_card(self._traces.subject.gpu)
            bound = live_bound(trace, card, self._usable_bytes)
            self._largest = largest_up_to(self._replayed, bound)
        return size <= self._largest

    def _replayed(self, size: int) -> bool:
        if size not in self._seen:
            recipe = replace(self._recipe, batch_size=size)
            line = replay(
                self._traces.of(recipe),
                size,
                self._traces.subject.gpu,
                limit_bytes=self._usable_bytes,
                micro_steps=recipe.gradient_accumulation_steps,
                what_is_alive=False,
            )
            self._seen[size] = line.failed_bytes is None and line.retries == 0
        return self._seen[size]


def best(estimates: list[Estimate], request: Request) -> Estimate | None:
    """Return the best of those that fit by the request's objective; None if none do."""
    fitting = [each for each in estimates if each.fits]
    return min(fitting, key=lambda each: rank(each, request.objective), default=None)
