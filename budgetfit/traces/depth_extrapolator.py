"""DepthExtrapolator: full-depth traces from shortened models, validated.

What must be validated is that nothing outside the runs of equal blocks depends on their
number. This is done once for each kind of program with a model one period deeper: its
trace must be the first one extrapolated by one period, event for event. It is traced at
the second batch size if there is one (``depth_extrapolation.validate``).

What happens only in the middle of the full model (``if i == len(self.blocks) // 2``)
happens in neither, so its first forward is compared as well: once, as it takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from budgetfit.core.step_trace import StepTrace
from budgetfit.traces.tracer import TRACED_BATCH_SIZES, Program, Tracer
from budgetfit.tracing.blocks.block_signature import PlacedBlock, block_signatures
from budgetfit.tracing.blocks.repeated_runs import (
    KEPT_PERIODS,
    BlockRun,
    NotRepeatedError,
    find_runs,
)
from budgetfit.tracing.depth_extrapolation.extrapolate import extrapolate
from budgetfit.tracing.depth_extrapolation.growth import Growth, grown
from budgetfit.tracing.depth_extrapolation.owned_trace import owned_trace
from budgetfit.tracing.depth_extrapolation.run_layout import RunLayout, run_layout
from budgetfit.tracing.depth_extrapolation.validate import (
    compare_forward,
    fit_and_validate,
    validate,
)
from budgetfit.tracing.fake.shortened_model import Shortening, shortening
from budgetfit.tracing.recording.batch_scaling import NotAffineError, exact_trace
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    Kind: TypeAlias = tuple[Program, bool]

# A shortened model must have at most this part of all blocks: up to three are traced,
# and one where the kind of program is validated.
MAX_KEPT_FRACTION = 0.6
MAX_KEPT_FRACTION_OF_VALIDATED = 0.9


@dataclass(frozen=True, slots=True)
class DepthChecks:
    """What was checked of a model's depth, once for all its workloads.

    Attributes:
        compared: Whether the model's own checkpointing was on in full forwards that
            extrapolated ones were compared with.
        validated: Kinds of programs that a model one period deeper has shown to do
            nothing outside the blocks that depends on their number.
    """

    compared: set[bool] = field(default_factory=set)
    validated: set[Kind] = field(default_factory=set)


class DepthExtrapolator:
    """Extrapolates traces of one workload, by what is known of its model's depth.

    Where the first kind fails the model's blocks do not repeat, and no other is tried.
    """

    def __init__(self, checks: DepthChecks) -> None:
        self._blocks: dict[str, PlacedBlock] | None = None
        self._checks = checks
        self._grow: set[Kind] = set()
        self._failed: dict[Kind, str] = {}
        self._shortenings: dict[tuple[tuple[BlockRun, ...], int], Shortening] = {}
        self._layouts: dict[tuple[BlockRun, ...], list[RunLayout]] = {}
        self._affine = True  # as far as is known

    def trace(
        self,
        program: Program,
        batch_sizes: Sequence[int],
        tracer: Tracer,
        *,
        uniform: bool = False,
    ) -> StepTrace | None:
        """Return the full trace from a shortened model's; None if that saves little.

        Of two batch sizes the trace is affine. ``uniform``: as in ``Tracer.trace``.

        Raises:
            NotRepeatedError: If the full model must be traced.
            NotAffineError: If sizes are not affine in the batch size.
        """
        runs = self._runs(tracer.workload, program)
        if not runs:
            return None
        kind = _kind(program)
        if kind in self._failed or (self._failed and not self._checks.validated):
            raise NotRepeatedError(self._failed.get(kind, "as the first trace said"))
        try:
            plain = _plain(program)
            if (
                plain != program
                and program.own_checkpointing not in self._checks.compared
            ):
                # To compile or shard all blocks takes several times as long.
                self.trace(plain, batch_sizes[:1], tracer)
            trace_at = partial(tracer.trace, program, uniform=uniform)
            trace = self._trace(program, runs, batch_sizes, tracer, trace_at)
            self._compare_forward(program, trace, batch_sizes[0], tracer)
        except NotRepeatedError as error:
            if not self.is_validated(program):  # else only this program fails
                self._failed[kind] = str(error)
            raise
        if kind not in self._grow:  # else each is validated, which says by how much
            self._checks.validated.add(kind)
        return trace

    def shortening(self, workload: Workload, program: Program) -> Shortening | None:
        """Return how to shorten the model for a program; None if that saves little."""
        # None as well if no forward of the full model was compared yet.
        runs = self._runs(workload, program)
        if not runs or not self._checks.compared:
            return None
        return self._shortening(workload, runs, KEPT_PERIODS)

    def two_shortenings(
        self, program: Program, batch_size: int, tracer: Tracer
    ) -> tuple[Shortening, Shortening, int] | None:
        """Return two models, one a period longer, and the periods that it still lacks.

        None if to run both saves little, or runs of blocks lack different numbers.

        Raises:
            NotRepeatedError: If the full model must be traced.
        """
        workload = tracer.workload
        runs = self._runs(workload, program)
        numbers = {len(run.periods) for run in runs}
        if len(numbers) != 1:
            return None
        # The first period is an edge, which a third one adds: of a block, it is alike.
        alike = all(len(period) == 1 for run in runs for period in run.periods)
        few = KEPT_PERIODS - 1 - alike
        short, longer = (self._shortening(workload, runs, few + n) for n in (0, 1))
        kept = len(short.kept_blocks) + len(longer.kept_blocks)
        if kept > MAX_KEPT_FRACTION * len(workload.blocks):
            return None
        if not self._checks.compared:  # traces of the disk were, when they were made
            whole = self.trace(_plain(program), (batch_size,), tracer)
            if whole is None:
                return None
        return short, longer, numbers.pop() - few - 1

    def _shortening(
        self, workload: Workload, runs: tuple[BlockRun, ...], periods: int
    ) -> Shortening:
        """Return how to shorten the model: programs with equal runs share it."""
        key = runs, periods
        if key not in self._shortenings:
            model, blocks = workload.model, workload.blocks
            self._shortenings[key] = shortening(model, blocks, runs, periods)
        return self._shortenings[key]

    def _layouts_of(
        self, runs: tuple[BlockRun, ...], short: Shortening
    ) -> list[RunLayout]:
        """Return where runs are in the full model, which ``short`` knows."""
        if runs not in self._layouts:
            layers = tuple(short.paths)
            self._layouts[runs] = [
                run_layout(run, layers, short.blocks) for run in runs
            ]
        return self._layouts[runs]

    def _runs(self, workload: Workload, program: Program) -> tuple[BlockRun, ...]:
        """Return a program's runs; none if shortening them saves little."""
        if self._blocks is None:
            self._blocks = block_signatures(workload.model, workload.blocks)
        runs = find_runs(workload.blocks, self._blocks, program.segments)
        left_out = sum(len(run.left_out(KEPT_PERIODS)) for run in runs)
        kept = len(workload.blocks) - left_out
        most = (
            MAX_KEPT_FRACTION_OF_VALIDATED
            if self.is_validated(program)
            else MAX_KEPT_FRACTION
        )
        return runs if kept <= most * len(workload.blocks) else ()

    def _trace(
        self,
        program: Program,
        runs: tuple[BlockRun, ...],
        batch_sizes: Sequence[int],
        tracer: Tracer,
        trace_at: Callable[[int, Shortening], RawTrace],
    ) -> StepTrace:
        workload = tracer.workload
        short, longer = (
            self._shortening(workload, runs, KEPT_PERIODS + more) for more in (0, 1)
        )
        layouts = self._layouts_of(runs, short)
        extra = [len(run.periods) - KEPT_PERIODS for run in runs]
        first = trace_at(batch_sizes[0], short)
        validated = self.is_validated(program) or (
            first.derived and self.is_validated(program._replace(accumulates=False))
        )
        if (
            len(batch_sizes) > 1
            and self._affine
            and (not validated or tracer.has_run(program, batch_sizes[1], longer))
        ):
            try:
                deeper = trace_at(batch_sizes[1], longer)
                fitted = fit_and_validate(
                    owned_trace(short, first), owned_trace(longer, deeper), layouts
                )
            except (NotRepeatedError, NotAffineError):
                pass  # separate traces show which of the two failed
            else:
                return extrapolate(fitted, layouts, extra).trace
        others = [trace_at(size, short) for size in batch_sizes[1:]]
        try:
            made = extrapolate(owned_trace(short, first, *others), layouts, extra)
        except NotAffineError:
            self._affine = False  # nor is another program likely to be
            raise
        growth = None
        if not validated:

            def validated_at(size: int) -> Growth | None:
                one = first if size == first.batch_size else trace_at(size, short)
                deeper = trace_at(size, longer)
                return validate(
                    owned_trace(short, one), owned_trace(longer, deeper), layouts
                )

            # At another size where both ran already: that was no line over the sizes.
            size = next(
                (
                    each
                    for each in TRACED_BATCH_SIZES
                    if tracer.has_run(program, each, short)
                    and tracer.has_run(program, each, longer)
                ),
                first.batch_size,
            )
            growth = validated_at(size)
            if growth is not None and size != first.batch_size:
                growth = validated_at(first.batch_size)  # by the storages of this one
        if growth is None:
            return made.trace
        if others or len(set(extra)) > 1:
            raise NotRepeatedError(
                "what its optimizer makes of all blocks grows with their number"
            )
        self._grow.add(_kind(program))
        return grown(made, growth, extra[0]).trace

    def _compare_forward(
        self, program: Program, trace: StepTrace, batch_size: int, tracer: Tracer
    ) -> None:
        """Compare an extrapolated trace with the full model's first forward, once.

        Once more with the model's own checkpointing, which may be of every n-th block;
        a recipe changes no forward.

        Raises:
            NotRepeatedError: If they differ.
        """
        if program.own_checkpointing in self._checks.compared:
            return
        try:
            forward = tracer.first_forward(program, batch_size)
        except Exception as error:
            raise NotRepeatedError(f"the full model does not run: {error}") from error
        compare_forward(trace, exact_trace(forward, tracer.workload.blocks))
        self._checks.compared.add(program.own_checkpointing)

    def is_validated(self, program: Program) -> bool:
        """Whether its kind is validated, itself or with gradient accumulation."""
        kinds = {_kind(program), _kind(program._replace(accumulates=True))}
        return not self._checks.validated.isdisjoint(kinds)


def _plain(program: Program) -> Program:
    """Return a program without torch.compile, on one GPU."""
    return program._replace(compile="none", sm_count=0, parallelism=None)


def _kind(program: Program) -> Kind:
    """Return what a validation holds for: everything that runs outside the blocks."""
    # How blocks are checkpointed only changes what is inside them, which is compared
    # for each trace; what counts here is whether any is. So it is with the
    # micro-batches of several GPUs: what is outside the blocks does the same in each.
    ranks = program.parallelism is not None
    accumulation = 1 if ranks else program.accumulation
    outside = program._replace(segments=(), loss_chunks=1, accumulation=accumulation)
    return outside, bool(program.segments)
