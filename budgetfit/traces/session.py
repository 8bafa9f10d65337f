"""TraceSession: the traces of one planning session, memoised and cached on disk."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import BudgetfitError, TraceError
from budgetfit.traces.cache.cache import TraceCache
from budgetfit.traces.cache.key import (
    trace_key,
    why_not_cacheable,
    workload_key,
)
from budgetfit.traces.errors import trace_error
from budgetfit.traces.shortened_traces import DepthExtrapolator
from budgetfit.traces.trace_recipe import trace_recipe
from budgetfit.traces.traced_settings import TracedSettings
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.recording.batch_scaling import (
    NotAffineError,
    affine_trace,
    exact_trace,
)
from budgetfit.tracing.values.concrete_execution import (
    MAX_WEIGHTS_BYTES,
    weights_bytes,
)
from budgetfit.tracing.values.known_values import UnknownValueError

if TYPE_CHECKING:
    from collections.abc import Callable

    from budgetfit.core.step_trace import StepTrace
    from budgetfit.gpus.table import Gpu
    from budgetfit.tracing.fake.shortened_model import Shortening
    from budgetfit.tracing.recording.raw_trace import RawTrace
    from budgetfit.workload.workload import Workload

# Never 1: broadcasting and squeezing differ there.
TRACED_BATCH_SIZES = (2, 3)
MAX_TRACED_BATCH_SIZE = 2**16  # its integers are real tensors in host memory


class TraceSession:
    """Traces recipes of one workload and memoises the traces.

    Repeated blocks are traced in a shortened model and extrapolated to full depth; with
    ``full_depth`` every block is traced. The traces are the same.

    Attributes:
        log: What was traced, for the plan's provenance.
        redirect_cuda: Whether CUDA devices named by the program are redirected to the
            CPU, at 6 to 10 % of the time. On from the start where CUDA is available,
            because such a program need not fail there.
        real_values: Whether control flow depends on tensor values, so that the forward
            runs on real tensors as well as on fakes.
    """

    def __init__(
        self,
        workload: Workload,
        progress: Callable[[str], None] | None = None,
        *,
        full_depth: bool = False,
    ) -> None:
        self.workload = workload
        self.log: list[str] = []
        self.progress = progress or (lambda _: None)
        self._extrapolator = None if full_depth else DepthExtrapolator(workload)
        self._affine: dict[TracedSettings, StepTrace | None] = {}
        self._exact: dict[tuple[TracedSettings, int], StepTrace] = {}
        self._cache: tuple[TraceCache, str | None] | None = None
        self.real_values = False
        self.redirect_cuda = torch.cuda.is_available()

    @property
    def cache_notes(self) -> tuple[str, ...]:
        """Problems of the trace cache, as notes for the user."""
        if self._cache is None:
            return ()
        cache, key = self._cache
        trouble = cache.trouble
        if key is None and cache.folder is not None:
            reason = why_not_cacheable(self.workload)
            trouble = (
                "traces of this model cannot be kept, so that every plan makes them "
                f"again: nothing says what they depend on in {reason}"
            )
        return (trouble,) if trouble else ()

    def for_gpu(self, gpu: Gpu) -> TraceSession:
        """Return a session for another GPU; equal targets share their traces."""
        workload = replace(self.workload, gpu=gpu)
        if workload.target != self.workload.target:
            return TraceSession(workload, self.progress)
        other = copy.copy(self)
        other.workload = workload
        return other

    def use_workload(self, workload: Workload) -> None:
        """Trace an equal workload from now on, in case the first model changes."""
        self.workload = workload
        if self._extrapolator is not None:
            self._extrapolator.workload = workload

    def affine(
        self, recipe: Recipe, *, keep_own_checkpointing: bool = False
    ) -> StepTrace:
        """Return a trace affine in the batch size, or the ``exact`` one if none is.

        Raises:
            TraceError: If the model cannot run on fake tensors.
        """
        settings = TracedSettings.from_recipe(
            recipe, own_checkpointing=keep_own_checkpointing
        )
        if settings not in self._affine:
            self._affine[settings] = self._cached(
                (settings, None), lambda: self._trace_affine(recipe, settings)
            )
        affine = self._affine[settings]
        if affine is not None:
            return affine
        return self.exact(recipe, keep_own_checkpointing=keep_own_checkpointing)

    def cached_affine(self, recipe: Recipe) -> StepTrace | None:
        """Return the trace affine in the batch size, if it was made already."""
        return self._affine.get(TracedSettings.from_recipe(recipe))

    def exact(
        self, recipe: Recipe, *, keep_own_checkpointing: bool = False
    ) -> StepTrace:
        """Return a trace that is exact at the recipe's batch size.

        That is the affine trace if there is one, but never for a batch of one: views
        and copies differ where a dimension has size 1.
        """
        settings = TracedSettings.from_recipe(
            recipe, own_checkpointing=keep_own_checkpointing
        )
        affine = self._affine.get(settings)
        if affine is not None and recipe.batch_size >= min(TRACED_BATCH_SIZES):
            return affine
        key = (settings, recipe.batch_size)
        if key not in self._exact:
            try:
                found = self._cached(key, lambda: self._trace_exactly(recipe, settings))
                assert found is not None  # noqa: S101 - an exact trace or an error
                self._exact[key] = found
            except TraceError as error:
                if affine is None:
                    raise
                self.log.append(f"batch {recipe.batch_size} is not traced: {error}")
                self._exact[key] = affine
        return self._exact[key]

    def evaluation(
        self, precision: str, tracer: Callable[[int, Shortening | None], RawTrace]
    ) -> StepTrace:
        """Return the trace of an evaluation step, affine in the batch size.

        Without a graph a block keeps nothing but its output, so the peak of a shortened
        model is that of the full one. Autocast keeps its casts of weights: under it the
        blocks are extrapolated, as in training.

        Args:
            precision: The only field of a recipe that evaluation depends on.
            tracer: Traces an evaluation at a batch size, of a shortened or full model.

        Raises:
            NotAffineError: If sizes are not affine in the batch size.
        """
        found = self._cached(
            ("evaluation", precision), lambda: self._evaluation(precision, tracer)
        )
        assert found is not None  # noqa: S101 - a trace or an error
        return found

    def _evaluation(
        self, precision: str, tracer: Callable[[int, Shortening | None], RawTrace]
    ) -> StepTrace:
        short = None
        if self._extrapolator is not None:
            recipe = Recipe(batch_size=1, precision=precision, optimizer="sgd")
            if find_precision(precision).autocast is None:
                short = self._extrapolator.shortening(recipe)
            else:
                trace = self._extrapolated_evaluation(recipe, tracer)
                if trace is not None:
                    return trace
        try:
            first, second = (tracer(size, short) for size in TRACED_BATCH_SIZES)
        except Exception:
            if short is None:
                raise
            short = None  # the shortened model may fail where the full one runs
            first, second = (tracer(size, None) for size in TRACED_BATCH_SIZES)
        blocks = self.workload.blocks if short is None else short.kept_blocks
        return affine_trace(first, second, blocks)

    def _extrapolated_evaluation(
        self, recipe: Recipe, tracer: Callable[[int, Shortening], RawTrace]
    ) -> StepTrace | None:
        """Return an evaluation trace extrapolated in depth; None where that fails."""
        assert self._extrapolator is not None  # noqa: S101 - called with one only
        try:
            return self._extrapolator.trace(
                recipe,
                TRACED_BATCH_SIZES,
                tracer,
                own_checkpointing=False,
                evaluates=True,
            )
        except Exception as error:  # noqa: BLE001 - the full model may run
            self.log.append(f"all blocks are evaluated: {error}")
            return None

    def _cached(
        self, settings: object, make: Callable[[], StepTrace | None]
    ) -> StepTrace | None:
        """Return a trace from the disk cache, or make and store it."""
        if self._cache is None:
            self._cache = TraceCache(), workload_key(self.workload)
        cache, workload = self._cache
        key = trace_key(workload, settings)
        trace = cache.load(key)
        if trace is not None:
            self.log.append(f"from the cache: {len(trace.events)} events")
            return trace
        trace = make()
        if trace is not None and not self.real_values:  # the key has no weights
            cache.store(key, trace)
        return trace

    def _trace_exactly(self, recipe: Recipe, settings: TracedSettings) -> StepTrace:
        """Trace at the recipe's own batch size, or an affine trace if it is too large.

        Integer values of a batch are propagated up to a limit only; control flow that
        depends on more of them cannot be traced.
        """
        if recipe.batch_size > MAX_TRACED_BATCH_SIZE:
            affine = self._trace_affine(recipe, settings)
            if affine is not None:
                self._affine[settings] = affine
                return affine
        try:
            trace = self._trace_extrapolated(recipe, (recipe.batch_size,), settings)
            if trace is not None:
                return trace
            raw = self._trace(
                recipe, recipe.batch_size, own_checkpointing=settings.own_checkpointing
            )
        except TraceError:
            if recipe.batch_size <= max(TRACED_BATCH_SIZES):
                raise
            affine = self._trace_affine(recipe, settings)
            if affine is not None:
                self._affine[settings] = affine
                return affine
            if not self.real_values:
                raise
            raw = self._trace(
                recipe, recipe.batch_size, own_checkpointing=settings.own_checkpointing
            )
        return exact_trace(raw, self.workload.blocks)

    def _trace_affine(
        self, recipe: Recipe, settings: TracedSettings
    ) -> StepTrace | None:
        try:
            trace = self._trace_extrapolated(recipe, TRACED_BATCH_SIZES, settings)
            if trace is not None:
                return trace
            first, second = (
                self._trace(recipe, size, own_checkpointing=settings.own_checkpointing)
                for size in TRACED_BATCH_SIZES
            )
            return affine_trace(first, second, self.workload.blocks)
        except NotAffineError as error:
            self.log.append(f"every batch size is traced for itself: {error}")
            return None

    def _trace_extrapolated(
        self, recipe: Recipe, batch_sizes: tuple[int, ...], settings: TracedSettings
    ) -> StepTrace | None:
        """Trace a shortened model and extrapolate its depth; None if that fails.

        The full model may run where the shortened one fails, so it is traced instead.
        """

        def tracer(batch_size: int, short: Shortening) -> RawTrace:
            try:
                return self._trace(
                    recipe,
                    batch_size,
                    own_checkpointing=settings.own_checkpointing,
                    short=short,
                )
            except BudgetfitError as error:
                raise NotRepeatedError(f"its twin does not run: {error}") from error

        if self._extrapolator is None:
            return None
        try:
            return self._extrapolator.trace(
                recipe,
                batch_sizes,
                tracer,
                own_checkpointing=settings.own_checkpointing,
            )
        except NotRepeatedError as error:
            self.log.append(f"all blocks are traced: {error}")
            return None

    def _needs_values(self, error: Exception, batch_size: int) -> bool:
        """Whether the model needs real values and is small enough to be run with them.

        A larger batch may fail only because it has too many values to propagate.
        """
        return (
            isinstance(error, UnknownValueError)
            and not self.real_values
            and batch_size <= max(TRACED_BATCH_SIZES)
            and weights_bytes(self.workload.model) <= MAX_WEIGHTS_BYTES
        )

    def _trace(
        self,
        recipe: Recipe,
        batch_size: int,
        *,
        own_checkpointing: bool,
        short: Shortening | None = None,
    ) -> RawTrace:
        blocks = self.workload.blocks if short is None else short.short_blocks
        segments = recipe.segments if short is None else short.segments(recipe.segments)
        wrapped = len(recipe.wrapped_blocks)
        part = "" if short is None else f", in a twin with {len(blocks)}"
        self.progress(
            f"tracing batch {batch_size}, {recipe.precision}, {wrapped} of "
            f"{len(self.workload.blocks)} blocks recomputed{part}"
        )
        try:
            raw = trace_recipe(
                self.workload,
                replace(recipe, batch_size=batch_size, segments=segments),
                blocks=blocks,
                target=self.workload.target,
                own_checkpointing=own_checkpointing,
                short=short,
                real_values=self.real_values,
                redirect_cuda=self.redirect_cuda,
            )
        except BudgetfitError:
            raise
        except Exception as error:
            if not self.redirect_cuda and "cuda" in str(error).lower():
                self.redirect_cuda = True
            elif self._needs_values(error, batch_size):
                self.log.append(f"real values from here on: {error}")
                self.real_values = True
            else:
                raise trace_error(self.workload.model, error) from error
            return self._trace(
                recipe, batch_size, own_checkpointing=own_checkpointing, short=short
            )
        self.log.append(
            f"traced {recipe.precision} at batch {batch_size}, {wrapped} blocks "
            f"recomputed: {len(raw.log.events)} events{part}"
        )
        return raw
