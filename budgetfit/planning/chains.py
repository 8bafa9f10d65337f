"""The chain of one subject under one precision and optimizer, at any batch size."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.memory.chain_peak import chain_peak_bytes
from budgetfit.memory.profile import chain_profile
from budgetfit.memory.replay import ENDLESS_BYTES, kernel_card, replay
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.uniform_segments import best_uniform_segments
from budgetfit.timing.roofline import op_times_ns, step_time_ns, stretch_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.block_profile import ChainProfile
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.memory.stations import Station
    from budgetfit.planning.traces import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is fixed while segments and batch size are solved for.

    ``effective_batch_size`` None means no accumulation.
    """

    precision: str
    optimizer: str
    effective_batch_size: int | None = None
    accumulation: int | None = None

    def accumulation_at(self, batch_size: int) -> int:
        """Return the micro-batches per optimizer step at a micro-batch size."""
        if self.effective_batch_size is None:
            return self.accumulation or 1
        return max(1, self.effective_batch_size // batch_size)

    def recipe(self, batch_size: int, segments: tuple[Segment, ...] = ()) -> Recipe:
        """Return these settings as a recipe."""
        return Recipe(
            batch_size=batch_size,
            gradient_accumulation_steps=self.accumulation_at(batch_size),
            precision=self.precision,
            optimizer=self.optimizer,
            segments=segments,
        )


def every_block(blocks: tuple[str, ...]) -> tuple[Segment, ...]:
    """Return ordinary checkpointing: each block recomputed by itself."""
    return tuple(Segment((name,)) for name in blocks)


class Chains:
    """Profiles of a subject's chain; traces only when a program is first asked for."""

    def __init__(self, traces: Traces, setting: Setting) -> None:
        self.traces = traces
        self.setting = setting
        self._profiles: dict[int, ChainProfile] = {}

    def kept(self, batch_size: int) -> StepTrace:
        """Return the trace with everything kept."""
        return self.traces.of(self.setting.recipe(batch_size))

    def recomputed(self, batch_size: int) -> StepTrace | None:
        """Return the trace with every block recomputed; None without blocks."""
        blocks = self.traces.subject.blocks
        if not blocks:
            return None
        return self.traces.of(self.setting.recipe(batch_size, every_block(blocks)))

    def at(self, batch_size: int) -> ChainProfile:
        """Return the chain at a batch size."""
        if batch_size not in self._profiles:
            self._profiles[batch_size] = self._profile(batch_size)
        return self._profiles[batch_size]

    def within(self, limit_bytes: int) -> Callable[[int], ChainProfile]:
        """Return ``at`` for a search under a limit.

        The whole effective batch at once is a program of its own (gradients come and
        go), which is worth its traces only if it has a chance to fit.
        """
        effective = self.setting.effective_batch_size
        accumulating = Chains(
            self.traces,
            replace(self.setting, effective_batch_size=None, accumulation=2),
        )

        def profile_at(batch_size: int) -> ChainProfile:
            if batch_size == effective and batch_size > 1:
                chain = accumulating.at(batch_size)
                if self._least_bytes(chain) > limit_bytes:
                    return chain
            return self.at(batch_size)

        return profile_at

    def _least_bytes(self, chain: ChainProfile) -> int:
        """Return a peak that no plan is below, were the gradients not there at all."""
        segments = best_uniform_segments(Problem(chain=chain, budget_bytes=sys.maxsize))
        parameters = self.traces.subject.model.parameters()
        gradients = sum(4 * p.numel() for p in parameters if p.requires_grad)
        return chain_peak_bytes(chain, segments) - gradients

    def _profile(self, batch_size: int) -> ChainProfile:
        kept = self.kept(batch_size)
        gpu = self.traces.subject.gpu
        card = kernel_card(gpu)
        tf32 = find_precision(self.setting.precision).tf32
        times_ns = op_times_ns(kept, batch_size, gpu, tf32=tf32)

        def times_of(chain: Sequence[Station]) -> list[tuple[int, int]]:
            return [
                (
                    stretch_ns(kept, times_ns, *station.forward),
                    stretch_ns(kept, times_ns, *station.backward),
                )
                for station in chain
            ]

        return chain_profile(
            kept,
            self.recomputed(batch_size),
            batch_size,
            card,
            times_of,
            step_time_ns(kept, times_ns).optimizer_ns,
        )

    def reserve_bytes(self, batch_size: int) -> int:
        """Return how much more the allocator reserves than is live, as a first guess.

        The solver bounds live bytes, the judge what is reserved. The gap of the two
        traced programs at this batch is a fair guess for the programs between them.
        """
        gaps = []
        for trace in (self.kept(batch_size), self.recomputed(batch_size)):
            if trace is not None:
                line = replay(
                    trace,
                    batch_size,
                    self.traces.subject.gpu,
                    limit_bytes=ENDLESS_BYTES,
                )
                gaps.append(line.reserved_bytes - line.allocated_bytes)
        return min(gaps)


def with_optimizer(setting: Setting, optimizer: str) -> Setting:
    """Return the setting with another optimizer."""
    return replace(setting, optimizer=optimizer)
