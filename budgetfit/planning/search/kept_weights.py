"""FSDP2 that holds more of the weights on each rank: whether it may be faster.

Where weights are kept after the forward, each block's are gathered once per micro-batch
and not twice, and those of all blocks are held until their backward. Where each node
holds a copy (HSDP), shards are larger, and gathered within the node. So the traces of
freed weights, shared by all ranks, tell what either can be at best: their times without
waiting for the network, and without the second gathers, with no more memory.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from budgetfit.core.block_profile import ChainProfile
from budgetfit.planning.judge import times_of_ops
from budgetfit.planning.search.search import SearchResult, can_gain
from budgetfit.planning.session import PlanningSession, holding_more
from budgetfit.timing.collectives import COPY_OUT
from budgetfit.timing.kernel_times import phase_ops

MIN_GAIN: Final = 0.01  # another way to shard has to gain this much
_LEAST_BYTES: Final = 2  # of a gathered weight


def holding_more_can_gain(session: PlanningSession, least: SearchResult) -> bool:
    """Whether a session that holds more of the weights may find something faster.

    Args:
        session: Of any settings: True where it does not hold more.
        least: What was found before; True where its settings differ in more.
    """
    settings, before = session.settings, least.session.settings
    one, other = settings.parallelism, before.parallelism
    estimate = least.estimate
    if (
        estimate is None
        or one is None
        or other is None
        or settings.precision != before.precision
        or one not in holding_more(other)
    ):
        return True
    saved_ms, held_bytes = estimate.network_ms, 0
    if one.reshard_after_forward != other.reshard_after_forward:
        saved_ms += _gathering_ms(least)
        held_bytes = _held_bytes(session)

    def with_weights(chain: ChainProfile) -> ChainProfile:
        return replace(
            chain,
            static_bytes=chain.static_bytes + held_bytes,
            optimizer_bytes=max(0, chain.optimizer_bytes - held_bytes),
        )

    saved = saved_ms / estimate.step_ms
    gain = 1 - (1 - MIN_GAIN) / (1 - min(saved, 0.99))
    return can_gain(least.session, estimate, gain, with_weights)


def _held_bytes(session: PlanningSession) -> int:
    """Return the least that the kept weights take beyond those that are freed."""
    # Of two blocks at a time the weights are gathered in any case.
    model, blocks = session.workload.model, session.workload.blocks
    sizes = sorted(
        sum(each.numel() for each in model.get_submodule(name).parameters())
        for name in blocks
    )
    return _LEAST_BYTES * sum(sizes[:-2])


def _gathering_ms(freed: SearchResult) -> float:
    """Return what the copies of gathered weights take in the backwards of a step."""
    session, estimate = freed.session, freed.estimate
    assert estimate is not None  # noqa: S101 - asked for only then
    recipe = estimate.recipe
    trace = session.traces.exact(recipe)
    times = times_of_ops(trace, recipe, session.workload.gpu)
    phase = next(each for each in reversed(trace.phases) if each.name == "backward")
    ops = phase_ops(trace, phase)
    copies = np.array([name == COPY_OUT for name in trace.op_names], bool)
    taken_ns = times.times_ns[ops[copies[trace.ops.name[ops]]]].sum()
    return float(taken_ns) * recipe.gradient_accumulation_steps / 1e6
