"""Baselines: common checkpointing policies, each at its best batch size.

The chain formula leaves a margin, which would make baselines look worse than they are.
Fixed segments are one program, traced once for all batch sizes, so that each batch size
can be replayed instead.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from budgetfit.core.block_profile import BlockOption, BlockProfile, ChainProfile
from budgetfit.memory.replay import device_properties, replay
from budgetfit.planning.judging.judge import step_ms
from budgetfit.planning.profiling.block_chain import BlockChain
from budgetfit.planning.search.every_nth_block import EVERY_N_POLICY
from budgetfit.planning.search.largest_batch import (
    largest_by_live_bytes,
    largest_fitting,
)
from budgetfit.planning.search.search import (
    Request,
    judge_recipe,
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

BASELINES: Final = (
    ("everything kept", "none"),
    ("every block recomputed", "full"),
    ("Chen's sqrt(n) segments", "sqrt"),
)
EVERY_NTH: Final = ("every n-th block recomputed", EVERY_N_POLICY)  # shown only
MAX_REFUSALS: Final = 3  # batch sizes that the judge may refuse
_NOTHING: Final = BlockOption(
    mode="keep", saved_bytes=0, forward_bytes=0, backward_bytes=0
)


def best_with_policy(
    block_chain: BlockChain,
    policy: str | tuple[str, ...],
    request: Request,
    budget: Budget,
) -> Estimate:
    """Return a checkpointing policy at its best batch size, or at the smallest.

    The smallest where none fits. The loss is not chunked. The traces of Chen's long
    segments are slow (few repeated blocks), so that their batch size is chosen by the
    formula and traced once; so are n and the batch size of every n-th block.

    Args:
        block_chain: Gives the traces and settings.
        policy: As in ``Request.checkpointing``, except ``auto``.
        request: The objective, and the batch size if it is given.
        budget: What it has to fit into.

    Raises:
        InputError: If the policy or one of the named blocks is not known.
    """
    plain = BlockChain(
        block_chain.traces, replace(block_chain.settings, loss_chunks=1), frozenset()
    )
    if policy in ("sqrt", EVERY_N_POLICY):
        asked = replace(request, checkpointing=policy)
        for rounds in (1, MAX_REFUSALS):
            found = search(plain, asked, budget, max_rounds=rounds).estimate
            if found is not None:
                return found
    segments = policy_segments(plain, policy, request.batch_size or 1)
    return best_with_segments(plain, segments, request, budget)


def best_with_segments(
    block_chain: BlockChain,
    segments: tuple[Segment, ...],
    request: Request,
    budget: Budget,
) -> Estimate:
    """Return fixed segments at their best batch size, or the smallest if none fits.

    Takes two traces, and one more where the chosen batch size is another program.
    """
    batches = BaselineProfile(block_chain, segments, budget)
    for _ in range(MAX_REFUSALS):
        best = choose_batch_size(
            batches.profile_at,
            batches.solve,
            budget_bytes=sys.maxsize,
            objective=request.objective,
            effective_batch_size=block_chain.settings.effective_batch_size,
            batch_sizes=None if request.batch_size is None else [request.batch_size],
            micro_batches=block_chain.settings.accumulation or 1,
        ).best
        if best is None:
            break
        recipe = block_chain.settings.recipe(best.batch_size, segments)
        estimate = judge_recipe(block_chain, recipe, budget)
        if estimate.fits:
            return estimate
        batches.refused.add(best.batch_size)
    smallest = block_chain.settings.recipe(request.batch_size or 1, segments)
    return judge_recipe(block_chain, smallest, budget)


class BaselineProfile:
    """Profile and solver of a baseline for ``choose_batch_size``, by replay.

    One micro-batch of the effective size is another program, which frees gradients; it
    is treated as if it kept them. The judge decides in the end.
    """

    def __init__(
        self, block_chain: BlockChain, segments: tuple[Segment, ...], budget: Budget
    ) -> None:
        self._traces = block_chain.traces
        effective = block_chain.settings.effective_batch_size
        accumulation = 1 if effective in {None, 1} else 2
        self._recipe = replace(
            block_chain.settings.recipe(2, segments),
            gradient_accumulation_steps=block_chain.settings.accumulation
            or accumulation,
        )
        self._usable_bytes = budget.usable_bytes
        self._largest: int | None = None
        self._seen: dict[int, bool] = {}
        self.refused: set[int] = set()

    def profile_at(self, batch_size: int) -> ChainProfile:
        """Return a chain of one block with the time of the whole micro-batch."""
        recipe = replace(self._recipe, batch_size=batch_size)
        gpu, trace = self._traces.workload.gpu, self._traces.affine(recipe)
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
        """Return a solution if the batch size fits in the replay."""
        size = problem.chain.batch_size
        return Solution(
            segments=() if size not in self.refused and self._fits(size) else None,
            proven_optimal=False,
            explanation="replayed",
        )

    def _fits(self, size: int) -> bool:
        """Whether a batch size fits, by the largest that does: memory is monotonic."""
        trace = self._traces.affine(replace(self._recipe, batch_size=size))
        if len(trace.batch_sizes) == 1:
            return self._replayed(size)
        if self._largest is None:
            card = device_properties(self._traces.workload.gpu)
            bound = largest_by_live_bytes(trace, card, self._usable_bytes)
            self._largest = largest_fitting(self._replayed, bound)
        return size <= self._largest

    def _replayed(self, size: int) -> bool:
        if size not in self._seen:
            recipe = replace(self._recipe, batch_size=size)
            line = replay(
                self._traces.affine(recipe),
                size,
                self._traces.workload.gpu,
                limit_bytes=self._usable_bytes,
                micro_steps=recipe.gradient_accumulation_steps,
                breakdown=False,
            )
            self._seen[size] = line.failed_bytes is None and line.retries == 0
        return self._seen[size]


def best_fitting(estimates: list[Estimate], request: Request) -> Estimate | None:
    """Return the best estimate that fits, by the request's objective; else None."""
    fitting = [each for each in estimates if each.fits]
    return min(fitting, key=lambda each: rank(each, request.objective), default=None)
