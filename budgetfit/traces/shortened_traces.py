"""Traces of long models from twins with fewer blocks, and the proof that they hold.

What a twin's trace leaves to prove is that nothing outside the runs of equal blocks
depends on how many there are. A second twin, one period longer, shows it once for each
kind of program: its own trace must be the first one's made longer, event for event. It
is traced at the second batch size where one is needed (``longer_batch``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from budgetfit.tracing.blocks.block_signature import block_kinds
from budgetfit.tracing.blocks.repeated_runs import (
    KEPT_PERIODS,
    NotRepeatedError,
    find_runs,
)
from budgetfit.tracing.depth_extrapolation.columnar_trace import Names, difference
from budgetfit.tracing.depth_extrapolation.extrapolate import repeat_blocks
from budgetfit.tracing.depth_extrapolation.run_layout import flat_trace, run_layout
from budgetfit.tracing.depth_extrapolation.validate import line_and_proof
from budgetfit.tracing.fake.shortened_model import shortening
from budgetfit.tracing.recording.batch_scaling import (
    NotAffineError,
    affine_trace,
    step_trace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from budgetfit.core.recipe import Recipe
    from budgetfit.core.step_trace import StepTrace
    from budgetfit.tracing.blocks.block_signature import Block
    from budgetfit.tracing.blocks.repeated_runs import BlockRun
    from budgetfit.tracing.depth_extrapolation.columnar_trace import FlatTrace
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.workload.workload import Subject

    Tracer = Callable[[int, Shortening], RawTrace]


# Of all blocks at most so many are worth a twin: with the proof three are traced.
LARGEST_PART = 0.6


class Kind(NamedTuple):
    """What the proof depends on: what runs outside the blocks.

    How blocks are treated is a matter of their insides, where all that repeats is
    compared each time; that anything is done to them at all is told apart.
    """

    precision: str
    optimizer: str
    accumulates: bool
    own_checkpointing: bool
    treated: bool
    in_backward: bool
    evaluates: bool


class Twins:
    """The twins of one subject, and which kinds of programs are proven.

    Attributes:
        subject: Whose model is shortened; a copy of it serves as well.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._blocks: dict[str, Block] | None = None
        self._names: Names | None = None
        self._proven: set[Kind] = set()
        self._failed: dict[Kind, str] = {}

    def trace(
        self,
        recipe: Recipe,
        batch_sizes: Sequence[int],
        tracer: Tracer,
        *,
        own_checkpointing: bool,
        evaluates: bool = False,
    ) -> StepTrace | None:
        """Return the whole model's trace from its twin; None if there is no twin.

        Args:
            recipe: The program.
            batch_sizes: One, or two for a trace that holds for all.
            tracer: Traces a twin at a batch size.
            own_checkpointing: Whether the model's own checkpointing stays on.
            evaluates: Whether the tracer evaluates instead of training.

        Raises:
            NotRepeatedError: If the whole model must be traced.
            NotAffineError: If two batch sizes are on no line.
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
            if not self._is_proven(kind):  # else it is about this program alone
                self._failed[kind] = str(error)
            raise

    def shortening(self, recipe: Recipe) -> Shortening | None:
        """Return how to shorten the model for a recipe; None if there is no twin."""
        runs = self._runs(recipe)
        return self._shortening(runs, KEPT_PERIODS) if runs else None

    def _runs(self, recipe: Recipe) -> tuple[BlockRun, ...]:
        """Return the runs under a recipe, if a twin saves enough."""
        subject = self.subject
        if self._blocks is None:
            self._blocks = block_kinds(subject.model, subject.blocks)
        runs = find_runs(subject.blocks, self._blocks, recipe.segments)
        left_out = sum(len(run.left_out(KEPT_PERIODS)) for run in runs)
        stay = len(subject.blocks) - left_out
        return runs if stay <= LARGEST_PART * len(subject.blocks) else ()

    def _trace(
        self,
        kind: Kind,
        runs: tuple[BlockRun, ...],
        batch_sizes: Sequence[int],
        tracer: Tracer,
    ) -> StepTrace:
        names = self.names()
        short = self._shortening(runs, KEPT_PERIODS)
        counts = [len(run.periods) - KEPT_PERIODS for run in runs]
        raws = [tracer(batch_sizes[0], short)]
        if not self._is_proven(kind) and len(batch_sizes) > 1:
            try:
                flat = self._line_and_proof(
                    runs, short, raws[0], batch_sizes[1], tracer
                )
            except (NotRepeatedError, NotAffineError):
                pass  # each for itself says which of the two it is
            else:
                self._proven.add(kind)
                return self._longer(flat, runs, counts).to_trace(names)
        raws += [tracer(size, short) for size in batch_sizes[1:]]
        if not self._is_proven(kind):
            self._prove(runs, short, raws[0], tracer)
            self._proven.add(kind)
        trace = (
            affine_trace(raws[0], raws[1], short.kept_blocks)
            if len(raws) > 1
            else step_trace(raws[0], short.kept_blocks)
        )
        flat = flat_trace(trace, raws[0], short, names)
        return self._longer(flat, runs, counts).to_trace(names)

    def _is_proven(self, kind: Kind) -> bool:
        """Whether it is, or its like that accumulates: that contains all it runs."""
        return not self._proven.isdisjoint({kind, kind._replace(accumulates=True)})

    def _line_and_proof(
        self,
        runs: tuple[BlockRun, ...],
        short: Shortening,
        raw: RawTrace,
        batch_size: int,
        tracer: Tracer,
    ) -> FlatTrace:
        """Return a twin's trace for all batch sizes, proven by a longer twin."""
        names = self.names()
        longer = self._shortening(runs, KEPT_PERIODS + 1)
        other = tracer(batch_size, longer)
        return line_and_proof(
            flat_trace(step_trace(raw, short.kept_blocks), raw, short, names),
            flat_trace(step_trace(other, longer.kept_blocks), other, longer, names),
            lambda flat: self._longer(flat, runs, [1] * len(runs)),
            [run_layout(run, names) for run in runs],
        )

    def _prove(
        self,
        runs: tuple[BlockRun, ...],
        short: Shortening,
        raw: RawTrace,
        tracer: Tracer,
    ) -> None:
        """Compare a twin that is one period longer with this one made longer."""
        names = self.names()
        longer = self._shortening(runs, KEPT_PERIODS + 1)
        other = tracer(raw.batch_size, longer)
        real = flat_trace(step_trace(other, longer.kept_blocks), other, longer, names)
        made = self._longer(
            flat_trace(step_trace(raw, short.kept_blocks), raw, short, names),
            runs,
            [1] * len(runs),
        )
        found = difference(made, real)
        if found:
            raise NotRepeatedError(f"one block more makes a difference: {found}")

    def _longer(
        self, flat: FlatTrace, runs: Sequence[BlockRun], counts: Sequence[int]
    ) -> FlatTrace:
        for run, extra in zip(runs, counts, strict=True):
            flat = repeat_blocks(flat, run_layout(run, self.names()), extra)
        return flat

    def _shortening(self, runs: tuple[BlockRun, ...], periods: int) -> Shortening:
        return shortening(self.subject.model, self.subject.blocks, runs, periods)

    def names(self) -> Names:
        """Return the paths of the whole model's layers and blocks."""
        if self._names is None:
            layers = tuple(name for name, _ in self.subject.model.named_modules())
            self._names = Names(layers, self.subject.blocks)
        return self._names


def _kind(recipe: Recipe, *, own_checkpointing: bool, evaluates: bool) -> Kind:
    return Kind(
        recipe.precision,
        recipe.optimizer,
        recipe.gradient_accumulation_steps > 1,
        own_checkpointing,
        bool(recipe.segments),
        recipe.optimizer_in_backward,
        evaluates,
    )
