"""TraceSession: the traces of one planning session, memoised and cached on disk."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace

from budgetfit.batches.batch_tree import batch_size_of
from budgetfit.core.loop import RUN, Loop
from budgetfit.core.parallelism import MOST_GPUS
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.core.step_trace import EMPTY_CACHE, StepTrace
from budgetfit.core.validation import MAX_TRACED_SAMPLES
from budgetfit.errors import TraceError
from budgetfit.gpus.table import Gpu
from budgetfit.traces.cache.cache import TraceCache
from budgetfit.traces.cache.key import trace_key, why_not_cacheable, workload_key
from budgetfit.traces.ddp_buckets import gathers_nothing, with_ddp_buckets
from budgetfit.traces.depth_extrapolator import DepthChecks, DepthExtrapolator
from budgetfit.traces.errors import size_limit_error
from budgetfit.traces.quantized_loading import Loading
from budgetfit.traces.tracer import (
    COMPILED_BATCH_SIZES,
    TRACED_BATCH_SIZES,
    Program,
    Tracer,
)
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.fake.shortened_model import Shortening
from budgetfit.tracing.recording.batch_scaling import (
    NotAffineError,
    affine_trace,
    exact_trace,
)
from budgetfit.workload.workload import Workload

# Four views of each sample, a number of 8 bytes for each pair of views.
MAX_BYTES_PER_PAIR = 4 * 4 * 8


def smallest_sizes(workload: Workload) -> list[int]:
    """Return the batch sizes of which one is the smallest that runs."""
    # One sample, two (batch norm wants two values), or as many as the example has.
    own = batch_size_of(workload.batch, dims=workload.batch_dims)
    return sorted({1, 2, own})


class TraceSession:
    """Traces recipes of one workload and memoises the traces.

    Repeated blocks are traced in a shortened model and extrapolated to full depth; with
    ``full_depth`` every block is traced. The traces are the same.

    Attributes:
        tracer: Traces one program at one batch size.
    """

    def __init__(
        self,
        workload: Workload,
        progress: Callable[[str], None] | None = None,
        *,
        full_depth: bool = False,
        depth_checks: DepthChecks | None = None,
    ) -> None:
        """``depth_checks``: of another workload of this model, which are shared."""
        self.tracer = Tracer(workload, progress or (lambda _: None))
        self._depth_checks = DepthChecks() if depth_checks is None else depth_checks
        self._extrapolator = (
            None if full_depth else DepthExtrapolator(self._depth_checks)
        )
        self._compiled_sizes = COMPILED_BATCH_SIZES[0]
        self._affine: dict[Program, StepTrace | None] = {}
        self._exact: dict[tuple[Program, int], StepTrace] = {}
        self._smallest: int | None = None
        self._cache: tuple[TraceCache, str | None] | None = None
        self._loading: Loading | None = None

    @property
    def workload(self) -> Workload:
        """The workload that is traced."""
        return self.tracer.workload

    @property
    def log(self) -> list[str]:
        """What was traced, for the plan's provenance."""
        return self.tracer.log

    @property
    def loading(self) -> Loading:
        """What loading a quantised base does before each trace."""
        if self._loading is None:
            self._loading = Loading(self.workload.model)
        return self._loading

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
                "every plan traces this model again: traces cannot be kept because of "
                f"{reason}"
            )
        return (trouble,) if trouble else ()

    def for_gpu(self, gpu: Gpu) -> TraceSession:
        """Return a session for another GPU; equal targets share their traces."""
        workload = replace(self.workload, gpu=gpu)
        if workload.target != self.workload.target:
            return self.of_same_model(workload)
        other = copy.copy(self)
        other.tracer = copy.copy(self.tracer)
        other.tracer.workload = workload
        return other

    def of_same_model(self, workload: Workload) -> TraceSession:
        """Return a session of this model with another batch, or on several GPUs."""
        # The model's depth is not checked again, nor is its loading found again.
        other = TraceSession(
            workload,
            self.tracer.progress,
            full_depth=self._extrapolator is None,
            depth_checks=self._depth_checks,
        )
        other._loading = self._loading
        return other

    def affine(
        self, recipe: Recipe, *, keep_own_checkpointing: bool = False
    ) -> StepTrace:
        """Return a trace affine in the batch size, or the ``exact`` one if none is.

        With compiled blocks it is good enough to search by, not to judge by.

        Raises:
            TraceError: If the model cannot run on fake tensors.
        """
        program = self._program(recipe, own_checkpointing=keep_own_checkpointing)
        affine = self._make_affine(program)
        if affine is not None:
            return affine
        return self.exact(recipe, keep_own_checkpointing=keep_own_checkpointing)

    def is_affine(self, recipe: Recipe) -> bool:
        """Whether a recipe has a trace affine in the batch size.

        Raises:
            TraceError: If the model cannot run on fake tensors.
        """
        return self._make_affine(self._program(recipe)) is not None

    def has_line(self, recipe: Recipe) -> bool:
        """Whether a trace affine in the batch size is known of a recipe already."""
        return self._has_line(self._program(recipe))

    def _has_line(self, program: Program) -> bool:
        """Whether a program's affine trace is known, or takes no run."""
        # With and without gradient accumulation they take the same runs.
        return any(
            self._affine.get(program._replace(accumulates=more)) is not None
            for more in (True, False)
        )

    def largest_batch(self, recipe: Recipe, bound: int) -> int:
        """Return the largest batch size up to ``bound`` that CUDA's kernels take.

        Known where sizes are affine in the batch size; else ``bound``.

        Raises:
            TraceError: If the model cannot run on fake tensors.
        """
        affine = self._make_affine(self._program(recipe))
        return bound if affine is None else affine.largest_batch(bound)

    def compares_samples(self, recipe: Recipe) -> bool:
        """Whether a tensor has a few numbers for each pair of samples in a batch.

        Contrastive losses have such scores. Attention over the patches of all images in
        a row grows in the same way, but with hundreds of numbers for each pair.

        Raises:
            TraceError: If the model cannot run on fake tensors.
        """
        recipe = replace(recipe, compile="none")
        # Such a tensor is in every program of the model.
        if any(self._affine.values()) or self.is_affine(recipe):
            return False
        few, more = TRACED_BATCH_SIZES
        try:
            one, other = (
                self.exact(replace(recipe, batch_size=size)).fixed_bytes
                for size in TRACED_BATCH_SIZES
            )
        except TraceError:  # the model takes some sizes only
            return False
        if len(one) != len(other):
            return False
        is_small = (one > 0) & (one <= MAX_BYTES_PER_PAIR * few**2)
        return bool((is_small & (one * more**2 == other * few**2)).any())

    def _make_affine(self, program: Program) -> StepTrace | None:
        if program not in self._affine:
            try:
                self._affine[program] = self._cached(program)
            except TraceError as error:
                # The model may take other batch sizes only, if it has run at one.
                if not self._exact or program.compile != "none":
                    raise
                self.log.append(f"every batch size is traced for itself: {error}")
                self._affine[program] = None
        return self._affine[program]

    def smallest_batch(self, recipe: Recipe) -> int:
        """Return the smallest of ``smallest_sizes`` that the model was found to run at.

        Raises:
            TraceError: If it runs at none of them.
        """
        if self._smallest is None:
            first: TraceError | None = None
            ran = {size for _, size in self._exact}  # in any program
            for size in smallest_sizes(self.workload):
                try:
                    if size not in ran:
                        self.exact(replace(recipe, batch_size=size))
                except TraceError as error:
                    first = first or error
                else:
                    self._smallest = size
                    break
            else:
                assert first is not None  # noqa: S101 - every size has failed
                raise first
        return self._smallest

    def smallest_searched(self, recipe: Recipe) -> int:
        """Return the same, or 1 while a trace for all sizes leaves it unknown.

        To know it takes a trace of one sample, which few searches need.

        Raises:
            TraceError: If the model cannot run on fake tensors.
        """
        if self._smallest is None and self.is_affine(recipe):
            return 1
        return self.smallest_batch(recipe)

    def exact(
        self, recipe: Recipe, *, keep_own_checkpointing: bool = False, loop: Loop = RUN
    ) -> StepTrace:
        """Return a trace that is exact at the recipe's batch size.

        That is the affine trace if there is one, but never for a batch of one: views
        and copies differ where a dimension has size 1.

        Raises:
            TraceError: If the model cannot run on fake tensors, or a CUDA kernel does
                not take as many samples.
        """
        trace = self._exact_trace(
            recipe, keep_own_checkpointing=keep_own_checkpointing, loop=loop
        )
        exceeded = trace.exceeded_limit(recipe.batch_size)
        if exceeded is not None:
            raise size_limit_error(
                self.workload.model, trace, exceeded, recipe.batch_size
            )
        return trace

    def _exact_trace(
        self, recipe: Recipe, *, keep_own_checkpointing: bool, loop: Loop
    ) -> StepTrace:
        program = self._program(
            recipe, own_checkpointing=keep_own_checkpointing, loop=loop
        )
        several = recipe.batch_size >= min(TRACED_BATCH_SIZES)
        affine = None
        if recipe.compile == "none":
            if several and self._has_line(program):
                self._make_affine(program)
            affine = self._affine.get(program)
        if affine is not None and several:
            return affine
        key = (program, recipe.batch_size)
        if key not in self._exact:
            found = self._cached(*key)
            assert found is not None  # noqa: S101 - an exact trace or an error
            self._exact[key] = found
        return self._exact[key]

    def shortened(self, recipe: Recipe) -> tuple[StepTrace, StepTrace, int] | None:
        """Return traces of two models of few blocks, and how many periods both lack.

        The second has a period of blocks more than the first, and lacks so many of the
        whole model's. None if the blocks do not repeat, or too few times.
        """
        program, repeats = self._program(recipe), self._extrapolator
        if repeats is None:
            return None
        try:
            pair = repeats.two_shortenings(program, recipe.batch_size, self.tracer)
            if pair is None:
                return None
            *models, lacking = pair
            few, more = (self._cached(program, recipe.batch_size, x) for x in models)
        except NotRepeatedError as error:
            self.log.append(f"no model of few blocks: {error}")
            return None
        return None if few is None or more is None else (few, more, lacking)

    def blocks_with_changed_containers(self, recipe: Recipe) -> frozenset[str]:
        """Return the blocks that are given a container that the forward changes."""
        program = self._program(recipe)
        find = self.tracer.blocks_with_changed_containers
        repeats = self._extrapolator
        if repeats is not None and repeats.is_validated(program):
            short = repeats.shortening(self.workload, program)
            if short is not None and not find(program, recipe.batch_size, short):
                return frozenset()  # nor do those left out, which are equal
        return find(program, recipe.batch_size)

    def evaluation(self, precision: str, loop: Loop = RUN) -> StepTrace:
        """Return the trace of an evaluation loop, affine in the batch size.

        Raises:
            NotAffineError: If sizes are not affine in the batch size.
            Exception: What the model raises in evaluation mode.
        """
        kind = Loop(kind=loop.kind)
        if self._forwards_differ():
            raise NotAffineError("the forward of each batch size allocates other times")
        found = self._cached(Program(precision, evaluates=True, loop=kind))
        assert found is not None  # noqa: S101 - a trace or an error
        return found

    def _forwards_differ(self) -> bool:
        """Whether a forward at another batch size was found to allocate another time.

        Known of models that are traced at each size; so it is when they are evaluated.
        """
        few, more = TRACED_BATCH_SIZES
        return any(
            _forward_events(trace) != _forward_events(other)
            for (program, size), trace in self._exact.items()
            if size == few and program.compile == "none" and program.loss_chunks == 1
            if (other := self._exact.get((program, more))) is not None
        )

    def _program(
        self, recipe: Recipe, *, own_checkpointing: bool = False, loop: Loop = RUN
    ) -> Program:
        return Program.of_recipe(
            recipe,
            gpu=self.workload.gpu,
            own_checkpointing=own_checkpointing,
            loop=loop,
        )

    def _cached(
        self,
        program: Program,
        batch_size: int | None = None,
        short: Shortening | None = None,
    ) -> StepTrace | None:
        """Return a trace from the disk cache or a new one, and the loading before it.

        Without a batch size it is affine in that, or None. ``short``: of a shortened
        model, at a batch size.
        """
        trace = self._cached_steps(program, batch_size, short)
        if trace is None or program.evaluates:
            return trace
        if program.parallelism is None or program.parallelism.engine == "ddp":
            trace = self.loading.before(trace)
        return trace if program.compile == "none" else with_emptied_cache(trace)

    def _cached_steps(
        self, program: Program, batch_size: int | None, short: Shortening | None
    ) -> StepTrace | None:
        if self._cache is None:
            cache = TraceCache()
            kept = cache.folder is not None
            self._cache = cache, workload_key(self.workload) if kept else None
        cache, workload = self._cache
        what = (batch_size,) if short is None else (batch_size, short.left_out)
        key = trace_key(workload, (program, *what))
        shared = trace_key(workload, (*_with_any_ranks(program), *what))
        trace = cache.load(shared)  # the same key, but for DDP
        if trace is None and shared != key:
            trace = cache.load(key)
        if trace is not None:
            self.log.append(f"from the cache: {len(trace.events)} events")
            return trace
        if program.evaluates:
            trace = self._trace_evaluation(program)
        elif batch_size is None:
            trace = self._trace_affine(program)
        elif short is not None:
            raw = self.tracer.trace(program, batch_size, short)
            trace = exact_trace(raw, short.kept_blocks)
        else:
            trace = self._trace_exactly(program, batch_size)
        if trace is None:
            return None
        trace = with_ddp_buckets(trace, program.parallelism, self.workload.target)
        if not self.tracer.real_values:  # the key has no weights
            cache.store(shared if gathers_nothing(trace) else key, trace)
        return trace

    def _trace_evaluation(self, program: Program) -> StepTrace:
        """Trace an evaluation, of the shortened model where that takes as much."""
        # Without a graph a block keeps nothing but its output, so the peak of a
        # shortened model is that of the full one. Autocast keeps its casts of weights:
        # under it the blocks are extrapolated, as in training.
        short = None
        if self._extrapolator is not None:
            if find_precision(program.precision).autocast is None:
                short = self._extrapolator.shortening(self.workload, program)
            else:
                try:
                    trace = self._extrapolator.trace(
                        program, TRACED_BATCH_SIZES, self.tracer
                    )
                except NotAffineError:
                    raise  # nor are those of the full model
                except Exception as error:  # noqa: BLE001 - the full model may run
                    self.log.append(f"all blocks are evaluated: {error}")
                    trace = None
                if trace is not None:
                    return trace
        trace_at = self.tracer.trace
        try:
            first, second = (trace_at(program, n, short) for n in TRACED_BATCH_SIZES)
        except Exception:
            if short is None:
                raise
            short = None  # the shortened model may fail where the full one runs
            first, second = (trace_at(program, n) for n in TRACED_BATCH_SIZES)
        blocks = self.workload.blocks if short is None else short.kept_blocks
        return affine_trace(first, second, blocks)

    def _trace_exactly(self, program: Program, batch_size: int) -> StepTrace:
        """Trace at one batch size, or an affine trace if it is too large."""
        # Integer values of a batch are propagated up to a limit only; control flow that
        # depends on more of them cannot be traced.
        if batch_size > MAX_TRACED_SAMPLES and program.compile == "none":
            with contextlib.suppress(TraceError):  # it may take this size only
                affine = self._trace_affine(program)
                if affine is not None:
                    self._affine[program] = affine
                    return affine
        try:
            trace = self._trace_extrapolated(program, (batch_size,))
            if trace is not None:
                return trace
            raw = self.tracer.trace(program, batch_size)
        except TraceError as error:
            if batch_size <= max(TRACED_BATCH_SIZES) or program.compile != "none":
                raise
            try:
                affine = self._trace_affine(program)
            except TraceError:
                raise error from None
            if affine is not None:
                self._affine[program] = affine
                return affine
            if not self.tracer.real_values:
                raise
            raw = self.tracer.trace(program, batch_size)
        return exact_trace(raw, self.workload.blocks)

    def _trace_affine(self, program: Program) -> StepTrace | None:
        """Trace at two batch sizes; None where sizes are not affine in them."""
        # Those of compiled code are only roughly: its reductions are split. If they are
        # not with everything kept, no other program is traced at both sizes for this.
        kept = program._replace(segments=(), loss_chunks=1)
        if program.compile == "none" and self._affine.get(kept, ...) is None:
            return None
        pairs = [TRACED_BATCH_SIZES]
        if program.compile != "none":  # first those of the program before
            pairs = sorted(COMPILED_BATCH_SIZES, key=self._compiled_sizes.__ne__)
        for sizes in pairs:
            try:
                trace = self._trace_affine_at(program, sizes)
            except NotAffineError as error:
                self.log.append(str(error))
                continue
            if program.compile != "none":
                self._compiled_sizes = sizes
            return trace
        self.log.append("every batch size is traced for itself")
        return None

    def _trace_affine_at(self, program: Program, sizes: tuple[int, int]) -> StepTrace:
        uniform = program.compile != "none"
        trace = self._trace_extrapolated(program, sizes, uniform=uniform)
        if trace is not None:
            return trace
        first, second = (self.tracer.trace(program, n, uniform=uniform) for n in sizes)
        return affine_trace(first, second, self.workload.blocks)

    def _trace_extrapolated(
        self, program: Program, batch_sizes: tuple[int, ...], *, uniform: bool = False
    ) -> StepTrace | None:
        """Trace a shortened model and extrapolate its depth; None if that fails."""
        # The full model may run where the shortened one fails, so it is traced instead.
        # DeepSpeed's buffers hold gradients of several blocks: their sizes do not
        # repeat.
        parallelism = program.parallelism
        by_deepspeed = parallelism is not None and parallelism.engine == "deepspeed"
        if self._extrapolator is None or by_deepspeed or program.compile == "model":
            return None
        try:
            return self._extrapolator.trace(
                program, batch_sizes, self.tracer, uniform=uniform
            )
        except NotRepeatedError as error:
            self.log.append(f"all blocks are traced: {error}")
            return None


def _forward_events(trace: StepTrace) -> int:
    """Return how often the first forward allocates and frees."""
    first = next(row for row in trace.phases if row.name == "forward")
    return first.end - first.start


def with_emptied_cache(trace: StepTrace) -> StepTrace:
    """Return the trace with ``torch.cuda.empty_cache()`` at the end of its setup."""
    # Of a run that compiles: for that it runs a step whose results it drops, and frees
    # what that left cached, with what loading and casting the weights had left.
    setup = trace.events[: trace.phases[0].end]
    return trace.with_setup_events((*setup.tolist(), EMPTY_CACHE), ops_from=len(setup))


def _with_any_ranks(program: Program) -> tuple[object, ...]:
    """Return a program of DDP with any number of ranks; others as they are."""
    parallelism = program.parallelism
    if parallelism is None or parallelism.engine != "ddp":
        return (program,)
    one = program._replace(parallelism=replace(parallelism, gpus=MOST_GPUS))
    return one, "any ranks"
