"""The traces of one planning session: each program once, at two batch sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import BudgetfitError, TraceError
from budgetfit.traces.cache.cache import TraceCache
from budgetfit.traces.cache.key import (
    program_key,
    subject_key,
    why_not_cacheable,
)
from budgetfit.traces.errors import trace_error
from budgetfit.traces.program import Program
from budgetfit.traces.shortened_traces import Twins
from budgetfit.traces.traced_step import traced_step
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.recording.batch_scaling import (
    NotAffineError,
    affine_trace,
    step_trace,
)
from budgetfit.tracing.values.concrete_execution import (
    MOST_WEIGHTS_BYTES,
    weights_bytes,
)
from budgetfit.tracing.values.known_values import UnknownValueError

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.core.step_trace import StepTrace
    from budgetfit.gpus.table import Gpu
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.workload.workload import Subject

# Never 1: broadcasting and squeezing differ there (tracing T6).
TRACED_BATCH_SIZES = (2, 3)
LARGEST_TRACED_BATCH = 2**16  # its whole numbers are real: more would fill the host


class Traces:
    """Traces recipes of one subject and remembers them.

    ``whole`` traces every block, where otherwise equal blocks are traced in twins that
    have a few of them (tracing T9); the traces are the same.

    Attributes:
        log: What was traced, for the provenance.
        one_device: Whether what the program puts on CUDA by name is looked after, at 6
            to 10 % of the time; where CUDA is, such a program need not fail without.
        real_values: Whether the model's own numbers decide what it does, so that traces
            are computed beside with real ones.
    """

    def __init__(
        self,
        subject: Subject,
        progress: Callable[[str], None] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.subject = subject
        self.log: list[str] = []
        self.progress = progress or (lambda _: None)
        self._twins = None if whole else Twins(subject)
        self._affine: dict[Program, StepTrace | None] = {}
        self._exact: dict[tuple[Program, int], StepTrace] = {}
        self._cache: tuple[TraceCache, str | None] | None = None
        self.real_values = False
        self.one_device = torch.cuda.is_available()

    @property
    def cache_notes(self) -> tuple[str, ...]:
        """What is wrong with the cache on disk, for the user."""
        if self._cache is None:
            return ()
        cache, key = self._cache
        trouble = cache.trouble
        if key is None and cache.folder is not None:
            reason = why_not_cacheable(self.subject)
            trouble = (
                "traces of this model cannot be kept, so that every plan makes them "
                f"again: nothing says what they depend on in {reason}"
            )
        return (trouble,) if trouble else ()

    def on_card(self, gpu: Gpu) -> Traces:
        """Return traces for another card: these, where it runs the same programs."""
        other = Traces(replace(self.subject, gpu=gpu), self.progress)
        if other.subject.target == self.subject.target:
            for name in (
                *("log", "_twins", "_affine", "_exact"),
                *("real_values", "one_device"),
            ):
                setattr(other, name, getattr(self, name))
        return other

    def go_on_with(self, subject: Subject) -> None:
        """Trace an equal subject from now on, whatever becomes of the first model."""
        self.subject = subject
        if self._twins is not None:
            self._twins.subject = subject

    def of(self, recipe: Recipe, *, keep_own_checkpointing: bool = False) -> StepTrace:
        """Return a trace that holds at the recipe's batch size, if any from the cache.

        Raises:
            TraceError: If the model cannot run on fake tensors.
        """
        program = Program.of(recipe, own_checkpointing=keep_own_checkpointing)
        if program not in self._affine:
            self._affine[program] = self._kept(
                (program, None), lambda: self._trace_line(recipe, program)
            )
        line = self._affine[program]
        return line if line is not None else self.exact(recipe, program)

    def for_all_sizes(self, recipe: Recipe) -> StepTrace | None:
        """Return the trace that holds at every batch size, if it was made already."""
        return self._affine.get(Program.of(recipe))

    def once(
        self, recipe: Recipe, *, keep_own_checkpointing: bool = False
    ) -> StepTrace:
        """Return a trace at the recipe's own batch size and no other."""
        program = Program.of(recipe, own_checkpointing=keep_own_checkpointing)
        return self.exact(recipe, program)

    def exact(self, recipe: Recipe, program: Program | None = None) -> StepTrace:
        """Return a trace of this recipe at its own batch size, or one for all sizes.

        The one for all sizes is no truth about a batch of one: views and copies differ
        where a dimension has one entry (tracing T6).
        """
        program = program or Program.of(recipe)
        line = self._affine.get(program)
        if line is not None and recipe.batch_size >= min(TRACED_BATCH_SIZES):
            return line
        key = (program, recipe.batch_size)
        if key not in self._exact:
            try:
                found = self._kept(key, lambda: self._trace_exactly(recipe, program))
                assert found is not None  # noqa: S101 - an exact trace or an error
                self._exact[key] = found
            except TraceError as error:
                if line is None:
                    raise
                self.log.append(f"batch {recipe.batch_size} is not traced: {error}")
                self._exact[key] = line
        return self._exact[key]

    def evaluation(
        self, precision: str, tracer: Callable[[int, Shortening | None], RawTrace]
    ) -> StepTrace:
        """Return the trace of an evaluation for all batch sizes.

        Without a graph a block leaves nothing but its output, so that a twin with fewer
        blocks takes as much. Autocast's copies of weights stay: there a twin's blocks
        are repeated, as in training.

        Args:
            precision: Evaluation depends on nothing else of a recipe.
            tracer: Traces it at a batch size, in a twin or whole.

        Raises:
            NotAffineError: If sizes are on no line.
        """
        found = self._kept(
            ("evaluation", precision), lambda: self._evaluation(precision, tracer)
        )
        assert found is not None  # noqa: S101 - a trace or an error
        return found

    def _evaluation(
        self, precision: str, tracer: Callable[[int, Shortening | None], RawTrace]
    ) -> StepTrace:
        short = None
        if self._twins is not None:
            recipe = Recipe(batch_size=1, precision=precision, optimizer="sgd")
            if find_precision(precision).autocast is None:
                short = self._twins.shortening(recipe)
            else:
                twin = self._evaluation_twin(recipe, tracer)
                if twin is not None:
                    return twin
        try:
            first, second = (tracer(size, short) for size in TRACED_BATCH_SIZES)
        except Exception:
            if short is None:
                raise
            short = None  # a twin's failure is no word about the model
            first, second = (tracer(size, None) for size in TRACED_BATCH_SIZES)
        blocks = self.subject.blocks if short is None else short.kept_blocks
        return affine_trace(first, second, blocks)

    def _evaluation_twin(
        self, recipe: Recipe, tracer: Callable[[int, Shortening], RawTrace]
    ) -> StepTrace | None:
        """Return a twin's evaluation with its blocks repeated; None where it fails."""
        assert self._twins is not None  # noqa: S101 - asked for with twins only
        try:
            return self._twins.trace(
                recipe,
                TRACED_BATCH_SIZES,
                tracer,
                own_checkpointing=False,
                evaluates=True,
            )
        except Exception as error:  # noqa: BLE001 - no word about the model itself
            self.log.append(f"all blocks are evaluated: {error}")
            return None

    def _kept(
        self, program: object, make: Callable[[], StepTrace | None]
    ) -> StepTrace | None:
        """Return a trace from the cache on disk, or make it and keep it there."""
        if self._cache is None:
            self._cache = TraceCache(), subject_key(self.subject)
        cache, subject = self._cache
        key = program_key(subject, program)
        trace = cache.load(key)
        if trace is not None:
            self.log.append(f"from the cache: {len(trace.events)} events")
            return trace
        trace = make()
        if trace is not None and not self.real_values:  # its key knows no weights
            cache.store(key, trace)
        return trace

    def _trace_exactly(self, recipe: Recipe, program: Program) -> StepTrace:
        """Trace at the recipe's own batch size, or through small ones if it is vast.

        The whole numbers in a batch are followed up to a limit (tracing T8); a model
        that asks about them cannot be traced with more.
        """
        if recipe.batch_size > LARGEST_TRACED_BATCH:
            line = self._trace_line(recipe, program)
            if line is not None:
                self._affine[program] = line
                return line
        try:
            twin = self._twin_trace(recipe, (recipe.batch_size,), program)
            if twin is not None:
                return twin
            raw = self._trace(
                recipe, recipe.batch_size, own_checkpointing=program.own_checkpointing
            )
        except TraceError:
            if recipe.batch_size <= max(TRACED_BATCH_SIZES):
                raise
            line = self._trace_line(recipe, program)
            if line is not None:
                self._affine[program] = line
                return line
            if not self.real_values:
                raise
            raw = self._trace(
                recipe, recipe.batch_size, own_checkpointing=program.own_checkpointing
            )
        return step_trace(raw, self.subject.blocks)

    def _trace_line(self, recipe: Recipe, program: Program) -> StepTrace | None:
        try:
            twin = self._twin_trace(recipe, TRACED_BATCH_SIZES, program)
            if twin is not None:
                return twin
            first, second = (
                self._trace(recipe, size, own_checkpointing=program.own_checkpointing)
                for size in TRACED_BATCH_SIZES
            )
            return affine_trace(first, second, self.subject.blocks)
        except NotAffineError as error:
            self.log.append(f"every batch size is traced for itself: {error}")
            return None

    def _twin_trace(
        self, recipe: Recipe, batch_sizes: tuple[int, ...], program: Program
    ) -> StepTrace | None:
        """Trace a twin with fewer blocks and repeat them; None where that cannot be.

        Whatever goes wrong in a twin is no word about the model: it is traced whole.
        """

        def tracer(batch_size: int, short: Shortening) -> RawTrace:
            try:
                return self._trace(
                    recipe,
                    batch_size,
                    own_checkpointing=program.own_checkpointing,
                    short=short,
                )
            except BudgetfitError as error:
                raise NotRepeatedError(f"its twin does not run: {error}") from error

        if self._twins is None:
            return None
        try:
            return self._twins.trace(
                recipe, batch_sizes, tracer, own_checkpointing=program.own_checkpointing
            )
        except NotRepeatedError as error:
            self.log.append(f"all blocks are traced: {error}")
            return None

    def _needs_values(self, error: Exception, batch_size: int) -> bool:
        """Say whether a model asks for values, and is small enough to have them.

        A larger batch may ask only because its own are too many to be followed.
        """
        return (
            isinstance(error, UnknownValueError)
            and not self.real_values
            and batch_size <= max(TRACED_BATCH_SIZES)
            and weights_bytes(self.subject.model) <= MOST_WEIGHTS_BYTES
        )

    def _trace(
        self,
        recipe: Recipe,
        batch_size: int,
        *,
        own_checkpointing: bool,
        short: Shortening | None = None,
    ) -> RawTrace:
        blocks = self.subject.blocks if short is None else short.twin_blocks
        segments = recipe.segments if short is None else short.segments(recipe.segments)
        wrapped = len(recipe.wrapped_blocks)
        part = "" if short is None else f", in a twin with {len(blocks)}"
        self.progress(
            f"tracing batch {batch_size}, {recipe.precision}, {wrapped} of "
            f"{len(self.subject.blocks)} blocks recomputed{part}"
        )
        try:
            raw = traced_step(
                self.subject,
                replace(recipe, batch_size=batch_size, segments=segments),
                blocks=blocks,
                target=self.subject.target,
                own_checkpointing=own_checkpointing,
                short=short,
                real_values=self.real_values,
                one_device=self.one_device,
            )
        except BudgetfitError:
            raise
        except Exception as error:
            if not self.one_device and "cuda" in str(error).lower():
                self.one_device = True
            elif self._needs_values(error, batch_size):
                self.log.append(f"real values from here on: {error}")
                self.real_values = True
            else:
                raise trace_error(self.subject.model, error) from error
            return self._trace(
                recipe, batch_size, own_checkpointing=own_checkpointing, short=short
            )
        self.log.append(
            f"traced {recipe.precision} at batch {batch_size}, {wrapped} blocks "
            f"recomputed: {len(raw.log.events)} events{part}"
        )
        return raw
