"""``BlockChain``: block profiles of a workload at any batch size, traced on demand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from budgetfit.core.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import CompileMode, Recipe, Segment, selective_blocks
from budgetfit.core.step_trace import StepTrace
from budgetfit.errors import InputError, TraceError
from budgetfit.memory.chain.live_bytes import LiveBytes
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.memory.chain.profile import (
    block_types,
    chain_profile,
    profile_on_line,
    with_epilogue,
    with_options_of,
)
from budgetfit.memory.chain.stages import MeasuredChain, OptionTrace, Stage
from budgetfit.memory.host_copies import setup_host_bytes
from budgetfit.memory.replay import UNLIMITED_BYTES, device_properties, replay
from budgetfit.planning.profiling.option_recipes import (
    ALL_OPTION_KINDS,
    OptionKind,
    option_segments,
)
from budgetfit.planning.profiling.selective_op_sets import (
    least_ns_per_freed_byte,
    op_sets_by_type,
)
from budgetfit.solvers.batch_size_grid import LARGEST_TRACED_SIZE
from budgetfit.solvers.problem import Problem
from budgetfit.solvers.uniform_segments import best_uniform_segments
from budgetfit.timing.collectives import waiting_ns
from budgetfit.timing.kernel_times import (
    Nanoseconds,
    OpTimes,
    interval_ns,
    op_times,
    step_time_ns,
)
from budgetfit.traces.tracer import TRACED_BATCH_SIZES

if TYPE_CHECKING:
    from budgetfit.traces.session import TraceSession

# The ratio of an op's output bytes to its time hardly depends on the batch size once
# kernels are busy, so that op sets are chosen at one size.
REFERENCE_BATCH_SIZE = 8
VERY_LONG = 1000  # times as long: kernels that all collectives can run beside


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Settings that stay fixed while segments and batch size are solved for.

    ``effective_batch_size`` is that of one rank; None leaves the number of
    micro-batches to ``accumulation``: one where that is None. ``host_ram_bytes`` limits
    pinned host memory, None for no limit. ``allocator`` are the settings of PyTorch's.
    ``parallelism`` has no dtypes: FSDP2 takes those of the precision.
    """

    precision: str
    optimizer: str
    effective_batch_size: int | None = None
    accumulation: int | None = None
    loss_chunks: int = 1
    optimizer_in_backward: bool = False
    compile: CompileMode = "none"
    host_ram_bytes: int | None = None
    allocator: AllocatorSettings = DEFAULT_SETTINGS
    parallelism: Parallelism | None = None

    def accumulation_at(self, batch_size: int) -> int:
        """Return the micro-batches per optimizer step at a micro-batch size."""
        if self.effective_batch_size is None:
            return self.accumulation or 1
        return max(1, self.effective_batch_size // batch_size)

    def recipe(self, batch_size: int, segments: tuple[Segment, ...] = ()) -> Recipe:
        """Return these settings as a recipe."""
        # Blocks whose weights are gathered one by one are recomputed one by one, also
        # in a segment of several.
        if self.parallelism is not None and self.parallelism.gathers:
            segments = tuple(
                replace(segment, blocks=(name,), nested=False)
                for segment in segments
                for name in segment.blocks
            )
        return Recipe(
            batch_size=batch_size,
            gradient_accumulation_steps=self.accumulation_at(batch_size),
            precision=self.precision,
            optimizer=self.optimizer,
            segments=segments,
            loss_chunks=self.loss_chunks,
            optimizer_in_backward=self.optimizer_in_backward,
            compile=self.compile,
            parallelism=self.parallelism
            and self.parallelism.in_precision(find_precision(self.precision)),
        )


def checkpoint_every_block(blocks: tuple[str, ...]) -> tuple[Segment, ...]:
    """Return ordinary checkpointing: each block recomputed by itself."""
    return tuple(Segment((name,)) for name in blocks)


class BlockChain:
    """The blocks of a workload under given settings: profiles at any batch size.

    Each program (kept, recomputed, one per set of options) is traced on first use.
    ``selective_waits``: see ``bounding_profile_at``; ``recomputes``: see ``only_kept``;
    ``streams_apart`` and ``only_at``: see the methods.
    """

    def __init__(  # noqa: PLR0913 - of chains for bounds
        self,
        traces: TraceSession,
        settings: TrainingSettings,
        option_kinds: frozenset[OptionKind] = ALL_OPTION_KINDS,
        unchunked: BlockChain | None = None,
        *,
        selective_waits: bool = True,
        streams_apart: bool = False,
        only_at: int | None = None,
        recomputes: bool = True,
    ) -> None:
        self.traces = traces
        self.settings = settings
        self.option_kinds = option_kinds
        if settings.compile != "none":  # there are no ops whose outputs to save
            self.option_kinds -= {"selective"}
        several = settings.parallelism
        if several is not None and several.engine == "deepspeed":
            self.option_kinds = frozenset()
        self._unchunked = unchunked
        self._selective_waits = selective_waits
        self._streams_apart = streams_apart
        self._only_at = only_at
        self._recomputes = recomputes
        self._profiles: dict[tuple[int, bool], ChainProfile] = {}
        self._option_segments: list[tuple[Segment, ...]] | None = None
        self._chunked: dict[int, BlockChain] = {}
        self._lower_bounds: dict[ChainProfile, int] = {}

    def all_kept(self, batch_size: int) -> StepTrace:
        """Return the trace with no block recomputed."""
        return self._traced(batch_size)

    def optimizer_bytes(self, batch_size: int) -> int:
        """Return the most bytes alive in an optimizer step, with everything kept."""
        kept = OptionTrace(self.all_kept(batch_size), ())
        measure = self._measure(batch_size, 0, exact_blocks=False)
        return measure(kept).optimizer_peak

    def op_count(self, batch_size: int) -> int:
        """Return the number of ops of a step without recomputation or loss chunks."""
        unchunked = self._unchunked or self
        return len(unchunked.all_kept(batch_size).ops.event)

    def all_recomputed(self, batch_size: int) -> OptionTrace | None:
        """Return the trace with every block recomputed; None without blocks."""
        segments = checkpoint_every_block(self.traces.workload.blocks)
        if not segments or not self._recomputes:
            return None
        return OptionTrace(self._traced(batch_size, segments), segments)

    def _traced(self, batch_size: int, segments: tuple[Segment, ...] = ()) -> StepTrace:
        """Return a trace for all sizes, or for the only one without accumulation."""
        # That one, the whole effective batch, is the trace that the judge takes.
        # So it does where no other size is of interest.
        recipe = self.settings.recipe(batch_size, segments)
        exact = self.is_whole(batch_size) or batch_size == self._only_at
        if exact and recipe.compile == "none":
            return self.traces.exact(recipe)
        return self.traces.affine(recipe)

    def option_traces(self, batch_size: int) -> list[OptionTrace]:
        """Return traces that try selective checkpointing and offload on each type."""
        # An option that the model cannot run (torch refuses to save what is overwritten
        # later) is left out, and the log says so.
        if self._option_segments is None:
            self._option_segments = self._segments_to_trace(batch_size)
        return [
            OptionTrace(self._option_trace(batch_size, segments), segments)
            for segments in self._option_segments
        ]

    def _option_trace(
        self, batch_size: int, segments: tuple[Segment, ...]
    ) -> StepTrace:
        if batch_size == self._only_at:
            return self._traced(batch_size, segments)
        return self.traces.affine(self.settings.recipe(batch_size, segments))

    def _segments_to_trace(self, batch_size: int) -> list[tuple[Segment, ...]]:
        kept, recomputed = self.all_kept(batch_size), self.all_recomputed(batch_size)
        if recomputed is None or not self.option_kinds:
            return []
        size = REFERENCE_BATCH_SIZE if len(kept.batch_sizes) > 1 else batch_size
        op_sets = (
            op_sets_by_type(
                kept,
                recomputed.trace,
                size,
                partial(self._op_times_ns, batch_size=size),
            )
            if "selective" in self.option_kinds
            else {}
        )
        while True:
            tried = option_segments(block_types(kept), op_sets, self.option_kinds)
            try:
                for segments in tried:
                    self._option_trace(batch_size, segments)
            except (InputError, TraceError) as error:
                if not op_sets:
                    self.traces.log.append(f"no further options: {error}")
                    return []
                self.traces.log.append(f"nothing is saved selectively: {error}")
                op_sets = {}
            else:
                return tried

    @cached_property
    def without_options(self) -> BlockChain:
        """The chain whose blocks are kept or recomputed, with these traces."""
        if not self.option_kinds:
            return self
        unchunked = self._unchunked and self._unchunked.without_options
        return BlockChain(self.traces, self.settings, frozenset(), unchunked)

    @cached_property
    def only_kept(self) -> BlockChain:
        """The chain whose blocks can only be kept: a trace less.

        With a chunked loss, which is measured with every block recomputed, they can be
        recomputed, too.
        """
        if self._unchunked is not None:
            return self.without_options
        return BlockChain(self.traces, self.settings, frozenset(), recomputes=False)

    def waiting_phases(self, batch_size: int) -> int:
        """Return how many phases of a step take what the host needs to issue them."""
        # With everything kept; with a chunked loss, with every block recomputed.
        recomputed = self._unchunked and self.all_recomputed(batch_size)
        program = recomputed or OptionTrace(self.all_kept(batch_size), ())
        return self._op_times(program, batch_size).waiting

    def least_ns_per_freed_byte(self) -> float:
        """Return a lower bound on the time that freeing a byte of activations takes."""
        # Of large batches, whose kernels take the least for each byte.
        kept, recomputed = self.all_kept(1), self.all_recomputed(1)
        if recomputed is None:
            return math.inf
        return least_ns_per_freed_byte(
            kept,
            recomputed.trace,
            LARGEST_TRACED_SIZE,
            partial(self._op_times_ns, batch_size=LARGEST_TRACED_SIZE),
        )

    @cached_property
    def gradient_bytes(self) -> int:
        """An upper bound on the bytes of all gradients."""
        parameters = self.traces.workload.model.parameters()
        return sum(4 * p.numel() for p in parameters if p.requires_grad)

    def with_loss_chunks(self, loss_chunks: int) -> BlockChain:
        """Return the block chain with a chunked loss, which shares these traces."""
        if loss_chunks not in self._chunked:
            settings = replace(self.settings, loss_chunks=loss_chunks)
            self._chunked[loss_chunks] = BlockChain(
                *(self.traces, settings, self.option_kinds, self),
                only_at=self._only_at,
            )
        return self._chunked[loss_chunks]

    def profile_at(self, batch_size: int, *, exact_blocks: bool = True) -> ChainProfile:
        """Return the chain profile; ``exact_blocks`` as in ``LiveBytes.of``.

        Where each batch size is traced for itself, those without exact blocks are on
        the line through the least two, and options are traced at the first: good enough
        to search by, not to judge by.

        A step takes the longest of a few sums over its ops, by how many phases wait for
        the host. One of these sums is taken for all options, so that no plan takes less
        than its blocks add up to; but for selective options, which wait longer.
        """
        key = batch_size, exact_blocks
        if key not in self._profiles:
            found = None if exact_blocks else self._profile_on_line(batch_size)
            self._profiles[key] = found or self.profile_waiting(
                *key, self.waiting_phases(batch_size)
            )
        return self._profiles[key]

    def bounding_profile_at(self, batch_size: int) -> ChainProfile:
        """Return the profile whose sums are at most the judge's time of any plan.

        That of ``profile_at`` charges selective options what the host needs, where a
        step in which all blocks have them waits for it. Beside other blocks the kernels
        may take longer.
        """
        waiting = self.waiting_phases(batch_size)
        whole = self._unchunked or self
        measured = whole.accumulating if whole.is_whole(batch_size) else whole
        if not any(
            selective_blocks(each.segments)
            and self._op_times(each, batch_size).waiting > waiting
            for each in measured.option_traces(batch_size)
        ):
            return self.profile_at(batch_size)
        return self.for_bounds.profile_at(batch_size)

    @cached_property
    def for_bounds(self) -> BlockChain:
        """The chain whose selective options wait as everything kept does."""
        unchunked = self._unchunked and self._unchunked.for_bounds
        given = self.traces, self.settings, self.option_kinds, unchunked
        return BlockChain(*given, selective_waits=False)

    @cached_property
    def streams_apart(self) -> BlockChain:
        """The chain for bounds, whose bytes no plan reserves less than.

        The allocator has pools for each stream. Those beside the default one have
        gathered weights and reduced gradients, as many bytes in any plan. The same
        chain on one GPU, and where what is cached may be released.
        """
        gpu, allocator = self.traces.workload.gpu, self.settings.allocator
        releases = allocator.collect_above_bytes(gpu.total_bytes) is not None
        if self.settings.parallelism is None or releases or self._streams_apart:
            return self
        unchunked = self._unchunked and self._unchunked.streams_apart
        return BlockChain(
            *(self.traces, self.settings, self.option_kinds, unchunked),
            selective_waits=self._selective_waits,
            streams_apart=True,
        )

    def only_at(self, batch_size: int) -> BlockChain:
        """Return the chain to profile at one batch size, with one trace per program.

        This chain where its traces hold for all sizes already, or are none of one size.
        """
        kept = self.settings.recipe(batch_size)
        if kept.compile != "none" or self.traces.has_line(kept):
            return self
        return BlockChain(
            self.traces, self.settings, self.option_kinds, only_at=batch_size
        )

    def _beside_bytes(self, batch_size: int) -> int:
        """Return what the streams but the default one hold in any plan."""
        whole = self._unchunked or self
        recomputed = whole.all_recomputed(batch_size)
        traces = [whole.all_kept(batch_size)]
        traces += [recomputed.trace] if recomputed else []
        return min(
            LiveBytes.of(
                trace,
                batch_size,
                device_properties(self.traces.workload.gpu),
                self.settings.allocator,
                exact_blocks=False,
            ).side_stream_bytes()
            for trace in traces
        )

    def profile_waiting(
        self, batch_size: int, exact_blocks: bool, waiting: int
    ) -> ChainProfile:
        """Return the profile in which so many phases take what the host needs."""
        make = self._profile if self._unchunked is None else self._chunked_profile
        profile = make(batch_size, waiting, exact_blocks=exact_blocks)
        return replace(profile, host_limit_bytes=self._host_limit(batch_size))

    def _profile_on_line(self, batch_size: int) -> ChainProfile | None:
        """Return a profile extrapolated from two others; None if it is to be traced."""
        sizes = TRACED_BATCH_SIZES
        compiled = self.settings.compile != "none"
        few, more = sizes
        if (
            batch_size == few
            or compiled
            or any(map(self.is_whole, (batch_size, *sizes)))
        ):
            return None
        every_block = checkpoint_every_block(self.traces.workload.blocks)
        # A chunked loss is measured with every block recomputed.
        chains = [(self._unchunked or self, ()), (self, every_block)]
        recipes = (
            chain.settings.recipe(batch_size, segments) for chain, segments in chains
        )
        if all(map(self.traces.is_affine, recipes)):
            return None
        try:
            first = self.profile_at(few, exact_blocks=False)
            if batch_size == more:
                if not self.option_kinds or self._unchunked is not None:
                    return None
                plain = self.without_options.profile_at(more, exact_blocks=False)
                return with_options_of(plain, first)
            second = self.profile_at(more, exact_blocks=False)
        except TraceError:  # the model does not take these
            return None
        return profile_on_line(first, second, batch_size)

    def _host_limit(self, batch_size: int) -> int | None:
        """Return the host memory that an offloaded optimizer leaves to blocks."""
        host_ram = self.settings.host_ram_bytes
        if host_ram is None:
            return None
        program = self.all_recomputed(batch_size)
        trace = program.trace if program is not None else self.all_kept(batch_size)
        return max(0, host_ram - setup_host_bytes(trace, batch_size))

    def profiles_within(
        self, limit_bytes: int, *, exact_blocks: bool = True
    ) -> Callable[[int], ChainProfile]:
        """Return ``profile_at`` for a search under a limit."""
        # Without accumulation (one micro-batch of the effective size) gradients are
        # freed within the step: another program, traced only if it may fit.
        accumulating = self.accumulating

        def profile_at(batch_size: int) -> ChainProfile:
            if self.is_whole(batch_size):
                chain = accumulating.profile_at(batch_size, exact_blocks=exact_blocks)
                if self._peak_lower_bound(chain) > limit_bytes:
                    return chain
            return self.profile_at(batch_size, exact_blocks=exact_blocks)

        return profile_at

    def is_whole(self, batch_size: int) -> bool:
        """Whether a micro-batch is the whole effective batch, of several samples."""
        return 1 < batch_size == self.settings.effective_batch_size

    @cached_property
    def accumulating(self) -> BlockChain:
        """The chain of these settings with gradients that outlive a step."""
        settings = replace(self.settings, effective_batch_size=None, accumulation=2)
        unchunked = self._unchunked and self._unchunked.accumulating
        return BlockChain(
            *(self.traces, settings, self.option_kinds, unchunked),
            selective_waits=self._selective_waits,
            streams_apart=self._streams_apart,
        )

    def _peak_lower_bound(self, chain: ChainProfile) -> int:
        """Return a lower bound of any plan's peak, without gradients."""
        if chain not in self._lower_bounds:
            problem = Problem(chain=chain, limit_bytes=sys.maxsize)
            peak_bytes = chain_peak_bytes(chain, best_uniform_segments(problem))
            self._lower_bounds[chain] = peak_bytes - self.gradient_bytes
        return self._lower_bounds[chain]

    def _chunked_profile(
        self, batch_size: int, waiting: int, *, exact_blocks: bool
    ) -> ChainProfile:
        """Return the profile with a chunked loss: only the epilogue differs."""
        # Measured from one trace, with every block recomputed.
        whole_loss = self._unchunked
        assert whole_loss is not None  # noqa: S101 - see ``profile_waiting``
        if waiting == whole_loss.waiting_phases(batch_size):
            whole = whole_loss.profile_at(batch_size, exact_blocks=exact_blocks)
        else:
            whole = whole_loss.profile_waiting(batch_size, exact_blocks, waiting)
        before, after = (
            each.all_recomputed(batch_size)
            or OptionTrace(each.all_kept(batch_size), ())
            for each in (whole_loss, self)
        )
        measured = self._measure(batch_size, waiting, exact_blocks=exact_blocks)
        return with_epilogue(whole, before, after, measured)

    def _measure(
        self, batch_size: int, waiting: int, *, exact_blocks: bool
    ) -> Callable[[OptionTrace], MeasuredChain]:
        """Return what measures traces at a batch size."""
        return partial(
            MeasuredChain.of,
            batch_size=batch_size,
            device=device_properties(self.traces.workload.gpu),
            times_of=partial(self._times_of, batch_size, waiting),
            settings=self.settings.allocator,
            exact_blocks=exact_blocks,
            beside_bytes=self._beside_bytes(batch_size)
            if self._streams_apart
            else None,
        )

    def _profile(
        self, batch_size: int, waiting: int, *, exact_blocks: bool
    ) -> ChainProfile:
        kept = self.all_kept(batch_size)
        recomputed = self.all_recomputed(batch_size)
        # The options are traced with accumulation, for smaller batches.
        has_options = recomputed is not None and bool(self.option_kinds)
        several = batch_size != self._only_at
        alike = has_options and several and self.is_whole(batch_size)
        shortest_ns, waiting_ns = self._network_ns(batch_size)
        profile = chain_profile(
            kept,
            recomputed,
            self._measure(batch_size, waiting, exact_blocks=exact_blocks),
            option_traces=self.option_traces(batch_size)
            if has_options and not alike
            else (),
            optimizer_ns=step_time_ns(
                kept, self._op_times_ns(OptionTrace(kept, ()), batch_size)
            ).optimizer_ns,
        )
        profile = replace(profile, shortest_ns=shortest_ns, waiting_ns=waiting_ns)
        if not alike:
            return profile
        other = self.accumulating.profile_waiting(batch_size, exact_blocks, waiting)
        return with_options_of(profile, other)

    def _network_ns(self, batch_size: int) -> tuple[int, int]:
        """Return ``shortest_ns`` and ``waiting_ns`` of a ``ChainProfile``."""
        # A micro-batch is never shorter than with everything kept. With kernels that
        # last very long, it waits for the collectives that none of them run beside.
        parallelism = self.settings.parallelism
        if parallelism is None:
            return 0, 0
        kept, recipe = self.all_kept(batch_size), self.settings.recipe(batch_size, ())
        count = recipe.gradient_accumulation_steps
        times_ns = self._op_times_ns(OptionTrace(kept, ()), batch_size)
        waits_ns = [
            waiting_ns(
                kept, times_ns * factor, parallelism, self.traces.workload.gpu, count
            )
            / count
            for factor in (1, VERY_LONG)
        ]
        time = step_time_ns(kept, times_ns)
        kernels_ns = time.forward_ns + time.backward_ns
        return int(kernels_ns + waits_ns[0]), int(waits_ns[1])

    def _op_times_ns(self, option_trace: OptionTrace, batch_size: int) -> Nanoseconds:
        return self._op_times(option_trace, batch_size).times_ns

    def _op_times(
        self, option_trace: OptionTrace, batch_size: int, waiting: int | None = None
    ) -> OpTimes:
        parallelism = self.settings.parallelism
        return op_times(
            option_trace.trace,
            batch_size,
            self.traces.workload.gpu,
            tf32=find_precision(self.settings.precision).tf32,
            selective_blocks=selective_blocks(option_trace.segments),
            micro_steps=self.settings.accumulation_at(batch_size),
            nodes=parallelism.nodes if parallelism else 1,
            waiting=waiting,
        )

    def _times_of(
        self,
        batch_size: int,
        waiting: int,
        option_trace: OptionTrace,
        chain: Sequence[Stage],
    ) -> list[tuple[int, int]]:
        if self._selective_waits and selective_blocks(option_trace.segments):
            waiting = max(waiting, self._op_times(option_trace, batch_size).waiting)
        times_ns = self._op_times(option_trace, batch_size, waiting).times_ns
        return [
            (
                interval_ns(option_trace.trace, times_ns, *stage.forward),
                interval_ns(option_trace.trace, times_ns, *stage.backward),
            )
            for stage in chain
        ]

    def reserve_bytes(
        self, batch_size: int, enough: Callable[[int], bool] = lambda _: False
    ) -> int:
        """Return an estimate of reserved minus allocated bytes.

        ``enough`` says of the least so far whether further programs need no trace.
        """
        # The solver bounds live bytes, the judge bounds reserved bytes. The smaller gap
        # of the two traced programs is the estimate for the programs between them.
        gaps: list[int] = []
        for trace in self._two_programs(batch_size):
            line = replay(
                trace,
                batch_size,
                self.traces.workload.gpu,
                limit_bytes=UNLIMITED_BYTES,
                settings=self.settings.allocator,
                breakdown=False,
            )
            gaps.append(line.reserved_bytes - line.allocated_bytes)
            if enough(min(gaps)):
                break
        return min(gaps)

    def _two_programs(self, batch_size: int) -> Iterator[StepTrace]:
        """Yield the trace of everything kept, then with every block recomputed.

        With a chunked loss, which is measured so, only the second.
        """
        if self._unchunked is None or not self.traces.workload.blocks:
            yield self.all_kept(batch_size)
        recomputed = self.all_recomputed(batch_size)
        if recomputed is not None:
            yield recomputed.trace
