"""Checkpointing policies: the segments, or the solver, of each name.

Of ``every-n``, transformers' ``every_n_layers``:
``PreTrainedModel.activation_checkpointing_enable(every_n_layers=n)`` (transformers
5.23, modeling_utils.py) recomputes the layers whose number, from 0, n divides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.planning.profiling.block_chain import BlockChain, checkpoint_every_block
from budgetfit.planning.search.solver_choice import fastest_plan, lowest_peak_nested
from budgetfit.solvers.problem import Problem, Solution
from budgetfit.solvers.uniform_segments import chen_segments

if TYPE_CHECKING:
    from budgetfit.planning.session import Checkpointing, PlanningSession

EVERY_N_POLICY: Final = "every-n"  # the policy for which n is searched
_NAMED: Final = re.compile(r"every-([1-9]\d{0,4})")
_ENDINGS: Final = {1: "st", 2: "nd", 3: "rd"}


def solver_for(session: PlanningSession) -> Callable[[Problem], Solution]:
    """Return the solver of the requested checkpointing policy, or refuse it."""
    policy = session.request.checkpointing
    if policy == "auto":
        memory = session.request.objective == "memory"
        return lowest_peak_nested if memory else fastest_plan
    if policy == "sqrt":
        return lambda problem: _fixed(problem, chen_segments(problem.chain))
    if policy == EVERY_N_POLICY:
        return fastest_every_nth
    segments = fixed_segments(policy, session.workload.blocks)
    return lambda problem: _fixed(problem, segments)


def fixed_segments(policy: Checkpointing, blocks: Sequence[str]) -> tuple[Segment, ...]:
    """Return the segments of a fixed checkpointing policy, or refuse it."""
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
        named = " ".join(repr(unknown[0]).split())[:80]
        known = ", ".join(blocks[:3]) or "none"
        raise InputError(
            f"{named} is not a block of this model. Its blocks are {known} ..."
            if len(blocks) > 3  # noqa: PLR2004 - as many as are shown
            else f"{named} is not a block of this model. Its blocks: {known}."
        )
    return tuple(Segment((name,)) for name in blocks if name in policy)


def policy_segments(
    block_chain: BlockChain, policy: Checkpointing, batch_size: int
) -> tuple[Segment, ...]:
    """Return a policy's segments at a batch size; refuse ``auto`` and unknown ones."""
    if policy == "sqrt":
        return chen_segments(block_chain.profile_at(batch_size))
    if policy == EVERY_N_POLICY:
        policy = "every-2"  # the lowest peak of them
    return fixed_segments(policy, block_chain.traces.workload.blocks)


def _fixed(problem: Problem, segments: tuple[Segment, ...]) -> Solution:
    fits = chain_peak_bytes(problem.chain, segments) <= problem.limit_bytes
    return Solution(
        segments=segments if fits else None,
        proven_optimal=False,
        explanation="As asked for; nothing was decided",
    )


def every_nth(blocks: Sequence[str], n: int) -> tuple[Segment, ...]:
    """Return ordinary checkpointing of blocks 0, n, 2n and so on."""
    return tuple(Segment((name,)) for name in blocks[::n])


def parse_every_n(policy: str) -> int | None:
    """Parse the n of a policy such as ``every-2``; None for another policy."""
    found = _NAMED.fullmatch(policy)
    return int(found[1]) if found else None


def every_n_of_segments(
    segments: Sequence[Segment], blocks: Sequence[str]
) -> int | None:
    """Return the n of ordinary checkpointing of every n-th block.

    Returns:
        0 where nothing is recomputed, 1 for every block, and None for segments of no
        such form.
    """
    if not segments:
        return 0
    numbers = {name: number for number, name in enumerate(blocks)}
    first = segments[1:2] or segments
    n = numbers.get(first[0].blocks[0], 0) or len(blocks)
    return n if every_nth(blocks, n) == tuple(segments) else None


def ordinal(n: int) -> str:
    """Return an ordinal number as text.

    >>> [ordinal(n) for n in (2, 3, 4, 11, 22)]
    ['2nd', '3rd', '4th', '11th', '22nd']
    """
    teens = n % 100 in (11, 12, 13)
    return f"{n}{'th' if teens else _ENDINGS.get(n % 10, 'th')}"


def fastest_every_nth(problem: Problem) -> Solution:
    """Return the fastest plan that checkpoints every n-th block, n at least 2."""
    # Without segments where none is within the budget.
    names = [
        block.name
        for block in problem.chain.blocks
        if block.option("recompute") is not None
    ]
    rated = [
        (chain_time_ns(problem.chain, plan), number, plan)
        for number, plan in enumerate(_plans(names))
        if chain_peak_bytes(problem.chain, plan) <= problem.limit_bytes
    ]
    return Solution(
        segments=min(rated)[2] if rated else None,
        proven_optimal=False,
        explanation="The fastest of every second, third ... block recomputed",
    )


def _plans(names: Sequence[str]) -> Iterator[tuple[Segment, ...]]:
    """Yield one plan for each number of recomputed blocks, n from 2 on."""
    seen = set()
    for n in range(2, len(names)):
        plan = every_nth(names, n)
        if len(plan) not in seen:
            seen.add(len(plan))
            yield plan
