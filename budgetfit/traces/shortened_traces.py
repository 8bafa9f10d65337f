"""DepthExtrapolator: full-depth traces from shortened models, validated.

What must be validated is that nothing outside the runs of equal blocks depends on their
number. This is done once for each kind of program with a model one period deeper: its
trace must be the first one extrapolated by one period, event for event. It is traced at
the second batch size if there is one (``depth_extrapolation.validate``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from budgetfit.tracing.blocks.block_signature import block_signatures
from budgetfit.tracing.blocks.repeated_runs import (
    KEPT_PERIODS,
    NotRepeatedError,
    find_runs,
)
from budgetfit.tracing.depth_extrapolation.columnar_trace import (
    ModulePaths,
    first_difference,
)
from budgetfit.tracing.depth_extrapolation.extrapolate import extrapolate_depth
from budgetfit.tracing.depth_extrapolation.run_layout import columnar_trace, run_layout
from budgetfit.tracing.depth_extrapolation.validate import fit_and_validate
from budgetfit.tracing.fake.shortened_model import shortening
from budgetfit.tracing.recording.batch_scaling import (
    NotAffineError,
    affine_trace,
    exact_trace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.recipe import Recipe
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.tracing.blocks.block_signature import PlacedBlock
    from budgetfit.tracing.blocks.repeated_runs import BlockRun
    from budgetfit.tracing.depth_extrapolation.columnar_trace import ColumnarTrace
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.workload.workload import Workload

    Tracer = Callable[[int, Shortening], RawTrace]


# A shortened model must have at most this part of all blocks: up to three are traced.
MAX_KEPT_FRACTION = 0.6


class ProgramKind(NamedTuple):
    """What a validation holds for: everything that runs outside the blocks.

    How blocks are checkpointed only changes what is inside them, which is compared for
    each trace; ``checkpoints`` says whether any is.
    """

    precision: str
    optimizer: str
    accumulates: bool
    own_checkpointing: bool
    checkpoints: bool
    in_backward: bool
    evaluates: bool


class DepthExtrapolator:
    """Extrapolates traces of one workload, and remembers validated kinds of programs.

    Attributes:
        workload: Its model is shortened; may be replaced by an equal one.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._blocks: dict[str, PlacedBlock] | None = None
        self._names: ModulePaths | None = None
        self._validated: set[ProgramKind] = set()
        self._failed: dict[ProgramKind, str] = {}

    def trace(
        self,
        recipe: Recipe,
        batch_sizes: Sequence[int],
        tracer: Tracer,
        *,
        own_checkpointing: bool,
        evaluates: bool = False,
    ) -> StepTrace | None:
        """Return the full trace from a shortened model's; None if that saves little.

        Args:
            recipe: The program.
            batch_sizes: One, or two for an affine trace.
            tracer: Traces a shortened model at a batch size.
            own_checkpointing: Whether the model's own checkpointing stays on.
            evaluates: Whether the tracer evaluates instead of training.

        Raises:
            NotRepeatedError: If the full model must be traced.
            NotAffineError: If sizes are not affine in the batch size.
        """
        runs = self._runs(recipe)
        if not runs:
            return None
        kind = _kind(recipe, own_checkpointing=own_checkpointing, evaluates=evaluates)
        if kind in self._failed:
            raise NotRepeatedError(self._failed[kind])
        try:
            return self._trace(kind, runs, batch_sizes, tracer)
        except NotRepeatedError as error:
            if not self._is_validated(kind):  # else only this program fails
                self._failed[kind] = str(error)
            raise

    def shortening(self, recipe: Recipe) -> Shortening | None:
        """Return how to shorten the model for a recipe; None if that saves little."""
        runs = self._runs(recipe)
        return self._shortening(runs, KEPT_PERIODS) if runs else None

    def _runs(self, recipe: Recipe) -> tuple[BlockRun, ...]:
        """Return the runs under a recipe; none if shortening them saves little."""
        workload = self.workload
        if self._blocks is None:
            self._blocks = block_signatures(workload.model, workload.blocks)
        runs = find_runs(workload.blocks, self._blocks, recipe.segments)
        left_out = sum(len(run.left_out(KEPT_PERIODS)) for run in runs)
        kept = len(workload.blocks) - left_out
        return runs if kept <= MAX_KEPT_FRACTION * len(workload.blocks) else ()

    def _trace(
        self,
        kind: ProgramKind,
        runs: tuple[BlockRun, ...],
        batch_sizes: Sequence[int],
        tracer: Tracer,
    ) -> StepTrace:
        names = self.names()
        short = self._shortening(runs, KEPT_PERIODS)
        counts = [len(run.periods) - KEPT_PERIODS for run in runs]
        raws = [tracer(batch_sizes[0], short)]
        if not self._is_validated(kind) and len(batch_sizes) > 1:
            try:
                columns = self._fit_and_validate(
                    runs, short, raws[0], batch_sizes[1], tracer
                )
            except (NotRepeatedError, NotAffineError):
                pass  # separate traces show which of the two failed
            else:
                self._validated.add(kind)
                return self._extended(columns, runs, counts).to_trace(names)
        raws += [tracer(size, short) for size in batch_sizes[1:]]
        if not self._is_validated(kind):
            self._validate(runs, short, raws[0], tracer)
            self._validated.add(kind)
        trace = (
            affine_trace(raws[0], raws[1], short.kept_blocks)
            if len(raws) > 1
            else exact_trace(raws[0], short.kept_blocks)
        )
        columns = columnar_trace(trace, raws[0], short, names)
        return self._extended(columns, runs, counts).to_trace(names)

    def _is_validated(self, kind: ProgramKind) -> bool:
        """Whether a kind is validated, itself or with gradient accumulation."""
        return not self._validated.isdisjoint({kind, kind._replace(accumulates=True)})

    def _fit_and_validate(
        self,
        runs: tuple[BlockRun, ...],
        short: Shortening,
        raw: RawTrace,
        batch_size: int,
        tracer: Tracer,
    ) -> ColumnarTrace:
        """Return a shortened model's affine trace, validated by a deeper model's."""
        names = self.names()
        longer = self._shortening(runs, KEPT_PERIODS + 1)
        other = tracer(batch_size, longer)
        return fit_and_validate(
            columnar_trace(exact_trace(raw, short.kept_blocks), raw, short, names),
            columnar_trace(
                exact_trace(other, longer.kept_blocks), other, longer, names
            ),
            lambda columns: self._extended(columns, runs, [1] * len(runs)),
            [run_layout(run, names) for run in runs],
        )

    def _validate(
        self,
        runs: tuple[BlockRun, ...],
        short: Shortening,
        raw: RawTrace,
        tracer: Tracer,
    ) -> None:
        """Compare the trace of a model one period deeper with the extrapolated one."""
        names = self.names()
        longer = self._shortening(runs, KEPT_PERIODS + 1)
        other = tracer(raw.batch_size, longer)
        real = columnar_trace(
            exact_trace(other, longer.kept_blocks), other, longer, names
        )
        extended = self._extended(
            columnar_trace(exact_trace(raw, short.kept_blocks), raw, short, names),
            runs,
            [1] * len(runs),
        )
        found = first_difference(extended, real)
        if found:
            raise NotRepeatedError(f"one block more makes a difference: {found}")

    def _extended(
        self, columns: ColumnarTrace, runs: Sequence[BlockRun], counts: Sequence[int]
    ) -> ColumnarTrace:
        for run, extra in zip(runs, counts, strict=True):
            columns = extrapolate_depth(columns, run_layout(run, self.names()), extra)
        return columns

    def _shortening(self, runs: tuple[BlockRun, ...], periods: int) -> Shortening:
        return shortening(self.workload.model, self.workload.blocks, runs, periods)

    def names(self) -> ModulePaths:
        """Return the paths of the full model's layers and blocks."""
        if self._names is None:
            layers = tuple(name for name, _ in self.workload.model.named_modules())
            self._names = ModulePaths(layers, self.workload.blocks)
        return self._names


def _kind(recipe: Recipe, *, own_checkpointing: bool, evaluates: bool) -> ProgramKind:
    return ProgramKind(
        recipe.precision,
        recipe.optimizer,
        recipe.gradient_accumulation_steps > 1,
        own_checkpointing,
        bool(recipe.segments),
        recipe.optimizer_in_backward,
        evaluates,
    )
