"""The chain of one subject under one precision and optimizer, at any batch size."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe, Segment, selective_blocks
from budgetfit.errors import InputError, TraceError
from budgetfit.memory.chain.measured_trace import Probe
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.memory.chain.profile import (
    block_types,
    chain_profile,
    with_other_epilogue,
)
from budgetfit.memory.host_copies import setup_host_bytes
from budgetfit.memory.replay import ENDLESS_BYTES, kernel_card, replay
from budgetfit.planning.profiling.option_probes import ALL_LEVERS, probe_segments
from budgetfit.planning.profiling.selective_op_sets import op_sets_by_type
from budgetfit.solvers.problem import Problem, Same
from budgetfit.solvers.uniform_segments import best_uniform_segments
from budgetfit.timing.roofline import op_times_ns, step_time_ns, stretch_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.block_profile import ChainProfile
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.memory.chain.stages import Station
    from budgetfit.planning.profiling.option_probes import Lever
    from budgetfit.timing.roofline import Nanoseconds
    from budgetfit.traces.session import Traces

# What an op's output weighs against its time hardly depends on the batch once kernels
# are busy; sets are chosen once, here.
REFERENCE_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is fixed while segments and batch size are solved for.

    ``effective_batch_size`` None leaves the number of micro-batches to
    ``accumulation``: one where that is None. ``host_ram_bytes`` is the most pinned host
    memory there is for training, None for no limit.
    """

    precision: str
    optimizer: str
    effective_batch_size: int | None = None
    accumulation: int | None = None
    loss_chunks: int = 1
    optimizer_in_backward: bool = False
    host_ram_bytes: int | None = None

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
            loss_chunks=self.loss_chunks,
            optimizer_in_backward=self.optimizer_in_backward,
        )


def every_block(blocks: tuple[str, ...]) -> tuple[Segment, ...]:
    """Return ordinary checkpointing: each block recomputed by itself."""
    return tuple(Segment((name,)) for name in blocks)


class Chains:
    """Profiles of a subject's chain; traces only when a program is first asked for."""

    def __init__(
        self,
        traces: Traces,
        setting: Setting,
        levers: frozenset[Lever] = ALL_LEVERS,
        whole_loss: Chains | None = None,
    ) -> None:
        self.traces = traces
        self.setting = setting
        self.levers = levers
        self._whole_loss = whole_loss
        self._profiles: dict[tuple[int, bool], ChainProfile] = {}
        self._probe_segments: list[tuple[Segment, ...]] | None = None
        self._accumulated: Chains | None = None
        self._in_parts: dict[int, Chains] = {}
        self._least: dict[Same, int] = {}

    def kept(self, batch_size: int) -> StepTrace:
        """Return the trace with everything kept."""
        return self.traces.of(self.setting.recipe(batch_size))

    def op_count(self, batch_size: int) -> int:
        """Return how many ops a step has with everything kept and the whole loss."""
        chains = self._whole_loss or self
        return len(chains.kept(batch_size).ops.event)

    def recomputed(self, batch_size: int) -> Probe | None:
        """Return the trace with every block recomputed; None without blocks."""
        segments = every_block(self.traces.subject.blocks)
        if not segments:
            return None
        return Probe(
            self.traces.of(self.setting.recipe(batch_size, segments)), segments
        )

    def probes(self, batch_size: int) -> list[Probe]:
        """Return traces that try the further options, each on a block of each type.

        An option that the model cannot run (torch refuses to save what is overwritten
        later) is left out, and the log says so.
        """
        if self._probe_segments is None:
            self._probe_segments = self._tried(batch_size)
        return [
            Probe(self.traces.of(self.setting.recipe(batch_size, segments)), segments)
            for segments in self._probe_segments
        ]

    def _tried(self, batch_size: int) -> list[tuple[Segment, ...]]:
        kept, recomputed = self.kept(batch_size), self.recomputed(batch_size)
        if recomputed is None or not self.levers:
            return []
        size = REFERENCE_BATCH_SIZE if len(kept.batch_sizes) > 1 else batch_size
        op_sets = (
            op_sets_by_type(
                kept,
                recomputed.trace,
                size,
                partial(self._op_times_ns, batch_size=size),
            )
            if "selective" in self.levers
            else {}
        )
        while True:
            tried = probe_segments(block_types(kept), op_sets, self.levers)
            try:
                for segments in tried:
                    self.traces.of(self.setting.recipe(batch_size, segments))
            except (InputError, TraceError) as error:
                if not op_sets:
                    self.traces.log.append(f"no further options: {error}")
                    return []
                self.traces.log.append(f"nothing is saved selectively: {error}")
                op_sets = {}
            else:
                return tried

    def with_loss_chunks(self, loss_chunks: int) -> Chains:
        """Return the chains of the same programs with the loss in so many parts."""
        if loss_chunks not in self._in_parts:
            setting = replace(self.setting, loss_chunks=loss_chunks)
            self._in_parts[loss_chunks] = Chains(
                self.traces, setting, self.levers, whole_loss=self
            )
        return self._in_parts[loss_chunks]

    def at(self, batch_size: int, *, tails: bool = True) -> ChainProfile:
        """Return the chain at a batch size; ``tails`` as in ``LiveCurve.of``."""
        key = batch_size, tails
        if key not in self._profiles:
            make = self._profile if self._whole_loss is None else self._other_loss
            profile = make(batch_size, tails=tails)
            self._profiles[key] = replace(
                profile, host_limit_bytes=self._host_limit(batch_size)
            )
        return self._profiles[key]

    def _host_limit(self, batch_size: int) -> int | None:
        """Return what an offloaded optimizer leaves of the host memory."""
        host_ram = self.setting.host_ram_bytes
        if host_ram is None:
            return None
        program = self.recomputed(batch_size)
        trace = program.trace if program is not None else self.kept(batch_size)
        return max(0, host_ram - setup_host_bytes(trace, batch_size))

    def within(
        self, limit_bytes: int, *, tails: bool = True
    ) -> Callable[[int], ChainProfile]:
        """Return ``at`` for a search under a limit.

        The whole effective batch at once is a program of its own (gradients come and
        go), which is worth its traces only if it has a chance to fit.
        """
        effective = self.setting.effective_batch_size
        accumulating = self._accumulating()

        def profile_at(batch_size: int) -> ChainProfile:
            if batch_size == effective and batch_size > 1:
                chain = accumulating.at(batch_size, tails=tails)
                if self._least_bytes(chain) > limit_bytes:
                    return chain
            return self.at(batch_size, tails=tails)

        return profile_at

    def _accumulating(self) -> Chains:
        if self._accumulated is None:
            setting = replace(self.setting, effective_batch_size=None, accumulation=2)
            whole = self._whole_loss and self._whole_loss._accumulating()  # noqa: SLF001
            self._accumulated = Chains(self.traces, setting, self.levers, whole)
        return self._accumulated

    def _least_bytes(self, chain: ChainProfile) -> int:
        """Return a peak that no plan is below, were the gradients not there at all."""
        key = Same(chain)
        if key not in self._least:
            problem = Problem(chain=chain, budget_bytes=sys.maxsize)
            parameters = self.traces.subject.model.parameters()
            gradients = sum(4 * p.numel() for p in parameters if p.requires_grad)
            peak_bytes = chain_peak_bytes(chain, best_uniform_segments(problem))
            self._least[key] = peak_bytes - gradients
        return self._least[key]

    def _other_loss(self, batch_size: int, *, tails: bool) -> ChainProfile:
        """Return the chain of the whole loss with what is behind the blocks changed.

        One program tells, with every block recomputed: blocks do not depend on it.
        """
        assert self._whole_loss is not None  # noqa: S101 - asked for by ``at`` only
        whole = self._whole_loss.at(batch_size, tails=tails)
        before, after = (
            chains.recomputed(batch_size) or Probe(chains.kept(batch_size), ())
            for chains in (self._whole_loss, self)
        )
        return with_other_epilogue(
            whole,
            before,
            after,
            batch_size,
            kernel_card(self.traces.subject.gpu),
            partial(self._times_of, batch_size),
            tails=tails,
        )

    def _profile(self, batch_size: int, *, tails: bool) -> ChainProfile:
        kept = self.kept(batch_size)
        recomputed = self.recomputed(batch_size)
        return chain_profile(
            kept,
            recomputed,
            batch_size,
            kernel_card(self.traces.subject.gpu),
            partial(self._times_of, batch_size),
            probes=self.probes(batch_size) if recomputed is not None else (),
            types=block_types(kept),
            optimizer_ns=step_time_ns(
                kept, self._op_times_ns(Probe(kept, ()), batch_size)
            ).optimizer_ns,
            tails=tails,
        )

    def _op_times_ns(self, probe: Probe, batch_size: int) -> Nanoseconds:
        return op_times_ns(
            probe.trace,
            batch_size,
            self.traces.subject.gpu,
            tf32=find_precision(self.setting.precision).tf32,
            selective_blocks=selective_blocks(probe.segments),
        )

    def _times_of(
        self, batch_size: int, probe: Probe, chain: Sequence[Station]
    ) -> list[tuple[int, int]]:
        times_ns = self._op_times_ns(probe, batch_size)
        return [
            (
                stretch_ns(probe.trace, times_ns, *station.forward),
                stretch_ns(probe.trace, times_ns, *station.backward),
            )
            for station in chain
        ]

    def reserve_bytes(self, batch_size: int) -> int:
        """Return how much more the allocator reserves than is live, as a first guess.

        The solver bounds live bytes, the judge what is reserved. The gap of the two
        traced programs at this batch is a fair guess for the programs between them.
        """
        gaps = []
        recomputed = self.recomputed(batch_size)
        traces = [recomputed.trace] if recomputed else []
        if self._whole_loss is None:
            traces.append(self.kept(batch_size))
        for trace in traces or [self.kept(batch_size)]:
            line = replay(
                trace,
                batch_size,
                self.traces.subject.gpu,
                limit_bytes=ENDLESS_BYTES,
                what_is_alive=False,
            )
            gaps.append(line.reserved_bytes - line.allocated_bytes)
        return min(gaps)
