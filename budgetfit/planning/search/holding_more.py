"""Settings that hold more on each rank: whether they may be faster.

Where FSDP2 keeps weights after the forward, each block's are gathered once per
micro-batch and not twice, and those of all blocks are held until their backward. Where
each node holds a copy (HSDP), shards are larger, and gathered within the node. Where
gradients are reduced in the last micro-batch alone, those of all weights are held until
then. Where DeepSpeed's collectives overlap what is computed, it has a second bucket. So
the traces of what holds least tell what each can be at best: their times without
waiting for the network, and without the second gathers, with no more memory.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from budgetfit.core.block_profile import ChainProfile
from budgetfit.memory.chain.peak import optimizer_step_bytes
from budgetfit.planning.judge import times_of_ops
from budgetfit.planning.search.search import SearchResult, can_gain
from budgetfit.planning.session import PlanningSession, holding_more, shard_bytes
from budgetfit.timing.collectives import COPY_OUT
from budgetfit.timing.kernel_times import phase_ops

MIN_GAIN: Final = 0.01  # another way to shard has to gain this much
_LEAST_BYTES: Final = 2  # of a gathered weight, or a gradient of one


def holding_more_can_gain(session: PlanningSession, least: SearchResult) -> bool:
    """Whether a session that holds more on each rank may find something faster.

    Args:
        session: Of any settings: True where it does not hold more.
        least: What was found before; True where its settings differ in more.
    """
    settings, before = session.settings, least.session.settings
    one, other = settings.parallelism, before.parallelism
    if (
        one is None
        or other is None
        or settings.precision != before.precision
        or one not in holding_more(other)
    ):
        return True
    keeps = one.reshard_after_forward != other.reshard_after_forward
    defers = one.sync_each_batch != other.sync_each_batch
    for_speed = session.request.objective == "throughput"
    # Without an effective batch size a plan has one micro-batch.
    accumulates = settings.effective_batch_size is not None
    if defers and not (for_speed and accumulates and least.estimate is not None):
        return False
    held_bytes = _held_bytes(session) if keeps else 0
    unreduced = _unreduced_bytes(session) if defers else {}
    weights_bytes, gradients_bytes = (
        shard_bytes(session, one, trained=trained)
        - shard_bytes(session, other, trained=trained)
        for trained in (False, True)
    )

    def with_more_held(chain: ChainProfile) -> ChainProfile:
        left_bytes = max(0, chain.optimizer_bytes - held_bytes)
        blocks = (
            replace(each, gradient_bytes=each.gradient_bytes - unreduced[each.name])
            if each.name in unreduced
            else each
            for each in chain.blocks
        )
        more_bytes = held_bytes + weights_bytes + sum(unreduced.values())
        return replace(
            chain,
            static_bytes=chain.static_bytes + more_bytes,
            optimizer_bytes=left_bytes + gradients_bytes,
            blocks=tuple(blocks) if unreduced else chain.blocks,
        )

    within = least.session.asking(budget=session.budget)
    size, chain = within.smallest_searched, within.block_chain.streams_apart
    smallest = with_more_held(chain.profile_at(size, exact_blocks=False))
    most_bytes = max(smallest.static_bytes, optimizer_step_bytes(smallest))
    if most_bytes > within.budget.usable_bytes:
        return False
    estimate = least.estimate
    if estimate is None or not for_speed:
        return True
    saved_ms = estimate.network_ms + (_gathering_ms(least) if keeps else 0)
    saved = saved_ms / estimate.step_ms
    gain = 1 - (1 - MIN_GAIN) / (1 - min(saved, 0.99))
    return saved > MIN_GAIN and can_gain(within, estimate, gain, with_more_held)


def _held_bytes(session: PlanningSession) -> int:
    """Return the least that the kept weights take beyond those that are freed."""
    # Of two blocks at a time the weights are gathered in any case.
    model, blocks = session.workload.model, session.workload.blocks
    sizes = sorted(
        sum(each.numel() for each in model.get_submodule(name).parameters())
        for name in blocks
    )
    return _LEAST_BYTES * sum(sizes[:-2])


def _unreduced_bytes(session: PlanningSession) -> dict[str, int]:
    """Return by block the least that whole gradients take beyond their shards."""
    model, parallelism = session.workload.model, session.settings.parallelism
    assert parallelism is not None  # noqa: S101 - asked for only then
    ranks = parallelism.gpus // parallelism.replicate
    # Shards are in the weights' dtype, at most twice as large as that of the gradients.
    return {
        name: sum(
            _LEAST_BYTES * each.numel() * (ranks - 2) // ranks
            for each in model.get_submodule(name).parameters()
            if each.requires_grad
        )
        for name in session.workload.blocks
    }


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
