"""FSDP2 with weights that are kept after the forward: whether it may be faster.

It gathers each block's weights once per micro-batch and not twice, and holds those of
all blocks until their backward. So the traces of weights that are freed tell what it
can be at best: their times without the second gathers, with so much less memory.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from budgetfit.core.block_profile import ChainProfile
from budgetfit.planning.judge import times_of_ops
from budgetfit.planning.search.search import SearchResult, can_gain
from budgetfit.planning.session import PlanningSession, keeping_weights
from budgetfit.timing.collectives import COPY_OUT
from budgetfit.timing.kernel_times import phase_ops

MIN_GAIN: Final = 0.01  # another way to shard has to gain this much
_LEAST_BYTES: Final = 2  # of a gathered weight


def keeping_weights_can_gain(session: PlanningSession, freed: SearchResult) -> bool:
    """Whether a session that keeps weights may find something faster.

    Args:
        session: Of any settings: True where it does not keep weights.
        freed: What was found before; True where its settings differ in more.
    """
    settings, before = session.settings, freed.session.settings
    kept, estimate = keeping_weights(before.parallelism), freed.estimate
    alike = settings.precision == before.precision and settings.parallelism == kept
    if kept is None or estimate is None or not alike:
        return True
    held_bytes = _held_bytes(session)

    def with_weights(chain: ChainProfile) -> ChainProfile:
        return replace(
            chain,
            static_bytes=chain.static_bytes + held_bytes,
            optimizer_bytes=max(0, chain.optimizer_bytes - held_bytes),
        )

    saved = (estimate.network_ms + _gathering_ms(freed)) / estimate.step_ms
    gain = 1 - (1 - MIN_GAIN) / (1 - min(saved, 0.99))
    return can_gain(freed.session, estimate, gain, with_weights)


def _held_bytes(session: PlanningSession) -> int:
    """Return the least that the kept weights take beyond those that are freed.

    Of two blocks at a time the weights are gathered in any case.
    """
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
