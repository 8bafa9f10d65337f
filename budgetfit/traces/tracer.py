"""Tracer: runs a program of one workload on fake tensors, at one batch size."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from budgetfit.batches.batch_tree import describe_batch, has_sparse_tensors
from budgetfit.core.loop import RUN, Loop
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.recipe import CompileMode, Recipe, Segment
from budgetfit.errors import BudgetfitError
from budgetfit.gpus.table import Gpu
from budgetfit.traces.errors import trace_error
from budgetfit.traces.loops.trace_loop import MOST_MICRO_STEPS
from budgetfit.traces.trace_program import (
    MICRO_STEPS,
    has_equal_micro_batches,
    trace_evaluation,
    trace_recipe,
)
from budgetfit.tracing.blocks.repeated_runs import NotRepeatedError
from budgetfit.tracing.compiled.compiled_blocks import CompiledBlocks
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.shortened_model import Shortening
from budgetfit.tracing.recording.changed_containers import ChangedContainers
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.tracing.recording.step_tracer import TraceOptions
from budgetfit.tracing.values.concrete_execution import MAX_WEIGHTS_BYTES, weights_bytes
from budgetfit.tracing.values.known_values import UnknownValueError
from budgetfit.tracing.values.value_checks import ValueChecks
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    _FirstStep: TypeAlias = tuple["Program", int, frozenset[str] | None, bool, bool]

# Never 1: broadcasting and squeezing differ there.
TRACED_BATCH_SIZES = (2, 3)
SLOW_SECONDS = 10.0  # of one trace: what a few take is worth a word
# Inductor chooses other kernels for the least batches, and where those end depends on
# the model: each pair is tried in turn.
COMPILED_BATCH_SIZES = ((16, 24), (24, 36), (36, 54))


class Program(NamedTuple):
    """What a trace depends on besides the workload and the batch size.

    ``evaluates``: an evaluation loop instead of training; only the precision counts.
    ``loop``: around the steps; ``accumulation``: the micro-batches of an update, where
    more than whether there are several counts: in loops that are run as they are.
    ``sm_count``: multiprocessors of the GPU that blocks are compiled for.
    """

    precision: str
    optimizer: str = "sgd"
    segments: tuple[Segment, ...] = ()
    accumulates: bool = False
    own_checkpointing: bool = False
    loss_chunks: int = 1
    optimizer_in_backward: bool = False
    evaluates: bool = False
    loop: Loop = RUN
    accumulation: int = 1
    compile: CompileMode = "none"
    sm_count: int = 0
    parallelism: Parallelism | None = None

    @classmethod
    def of_recipe(
        cls,
        recipe: Recipe,
        *,
        gpu: Gpu,
        own_checkpointing: bool = False,
        loop: Loop = RUN,
    ) -> Program:
        """Return a recipe's program; ``own_checkpointing``: the model's stays on."""
        # What a loop does between its steps, ``evaluation_batch_size``, is no part of
        # it.
        accumulation = recipe.gradient_accumulation_steps
        parallelism = recipe.parallelism
        if parallelism is not None:
            parallelism = replace(parallelism, gpus_per_node=None)
        if not has_equal_micro_batches(parallelism):
            accumulation = min(accumulation, MICRO_STEPS + 1)
        elif loop.kind == "run":
            accumulation = 1
        elif not loop.loads_update_first:
            accumulation = min(accumulation, MOST_MICRO_STEPS)
        return cls(
            precision=recipe.precision,
            optimizer=recipe.optimizer,
            segments=recipe.segments,
            accumulates=recipe.gradient_accumulation_steps > 1,
            own_checkpointing=own_checkpointing,
            loss_chunks=recipe.loss_chunks,
            optimizer_in_backward=recipe.optimizer_in_backward,
            loop=replace(loop, evaluation_batch_size=0),
            accumulation=accumulation,
            compile=recipe.compile,
            sm_count=gpu.sm_count if recipe.compile != "none" else 0,
            parallelism=parallelism,
        )

    def recipe(self, batch_size: int, segments: tuple[Segment, ...]) -> Recipe:
        """Return a recipe; ``segments``: in the paths of the traced model."""
        return Recipe(
            batch_size=batch_size,
            gradient_accumulation_steps=(
                (MICRO_STEPS if self.accumulates else 1)
                if self.loop.kind == "run" and has_equal_micro_batches(self.parallelism)
                else self.accumulation
            ),
            precision=self.precision,
            optimizer=self.optimizer,
            segments=segments,
            loss_chunks=self.loss_chunks,
            optimizer_in_backward=self.optimizer_in_backward,
            compile=self.compile,
            parallelism=self.parallelism,
        )


class Tracer:
    """Traces programs of one workload, and remembers what running them takes.

    Attributes:
        workload: May be replaced by an equal one, in case its model changes.
        progress: Called with what is traced.
        log: What was traced, for the plan's provenance.
        redirect_cuda: Whether CUDA devices named by the program are redirected to the
            CPU, at 6 to 10 % of the time. On from the start where CUDA is available,
            because such a program need not fail there.
        real_values: Whether control flow depends on tensor values, so that the forward
            runs on real tensors as well as on fakes.
    """

    def __init__(self, workload: Workload, progress: Callable[[str], None]) -> None:
        self.workload = workload
        self.progress = progress
        self.log: list[str] = []
        self.redirect_cuda = torch.cuda.is_available()
        self.real_values = False
        self._checks = ValueChecks()
        self._compiled: dict[tuple[CudaTarget, bool, bool], CompiledBlocks] = {}
        self._first_steps: dict[_FirstStep, RawTrace] = {}
        self._pace = ""  # what the last trace took, if it was long

    def trace(
        self,
        program: Program,
        batch_size: int,
        short: Shortening | None = None,
        *,
        uniform: bool = False,
    ) -> RawTrace:
        """Trace a program at a batch size, in the full or a shortened model.

        ``uniform``: see ``CompiledBlocks``.

        Raises:
            TraceError: If the model cannot run on fake tensors.
            NotRepeatedError: If the shortened model cannot.
            Exception: In an evaluation, what the model raises.
        """
        options, segments = self._options(program, short), program.segments
        blocks = options["blocks"]
        if short is not None:
            segments = short.segments(segments)
        if program.evaluates:
            recipe = program.recipe(batch_size, segments)
            return trace_evaluation(self.workload, recipe, loop=program.loop, **options)
        part = "" if short is None else f", in a shortened model with {len(blocks)}"
        wrapped = sum(len(segment.blocks) for segment in program.segments)
        known = self.has_run(program, batch_size, short)
        if not known:
            self.progress(
                f"tracing batch {batch_size}, {program.precision}, {wrapped} of "
                f"{len(self.workload.blocks)} blocks recomputed{part}"
                f"{self._pace}"
            )
        began = time.perf_counter()
        try:
            raw = trace_recipe(
                self.workload,
                program.recipe(batch_size, segments),
                own_checkpointing=program.own_checkpointing,
                loop=program.loop,
                compiled=self._compiled_blocks(program, uniform=uniform),
                once=partial(self._once, self._first_step(program, batch_size, short)),
                **options,
            )
        except Exception as error:
            failure = self._failure(error, batch_size)
            if failure is None:
                return self.trace(program, batch_size, short, uniform=uniform)
            if short is not None:
                reason = f"the shortened model does not run: {failure}"
                raise NotRepeatedError(reason) from error
            if failure is error:
                raise
            raise failure from error
        if not known:
            seconds = time.perf_counter() - began
            self._pace = ""
            if seconds > SLOW_SECONDS:
                reason = (
                    "samples of fewer tokens are faster where layers run token by "
                    "token, or the loss in many parts"
                    if program.compile == "none"
                    else "torch.compile generates code for each batch size"
                )
                self._pace = f"; the last one took {seconds:.0f} s: {reason}"
        how = "derived" if known else "traced"
        self.log.append(
            f"{how} {program.precision} at batch {batch_size}, {wrapped} blocks "
            f"recomputed: {len(raw.log.events)} events{part}"
        )
        return raw

    def first_forward(self, program: Program, batch_size: int) -> RawTrace:
        """Trace the first forward of a program that was traced before.

        Raises:
            Exception: What the model raises on fake tensors.
        """
        options = self._options(program)
        options["only_forward"] = True
        recipe, loop = program.recipe(batch_size, program.segments), program.loop
        if program.evaluates:
            return trace_evaluation(self.workload, recipe, loop=loop, **options)
        return trace_recipe(
            self.workload,
            recipe,
            own_checkpointing=program.own_checkpointing,
            loop=loop,
            **options,
        )

    def blocks_with_changed_containers(
        self, program: Program, batch_size: int, short: Shortening | None = None
    ) -> frozenset[str]:
        """Return the blocks that are given a container that the forward changes."""
        # The full or a shortened model runs, in a program that was traced before.
        # Blocks of a shortened one are in its paths.
        containers = ChangedContainers()
        options = self._options(program, short)
        options["containers"] = containers
        self.progress(f"finding blocks that change containers, batch {batch_size}")
        # What ran before may fail in full depth; blocks that ran until then were seen.
        with contextlib.suppress(Exception):
            trace_recipe(
                self.workload,
                program.recipe(batch_size, ()),
                own_checkpointing=program.own_checkpointing,
                loop=program.loop,
                compiled=self._compiled_blocks(program, uniform=False),
                **options,
            )
        return frozenset(containers.blocks)

    def has_run(
        self, program: Program, batch_size: int, short: Shortening | None
    ) -> bool:
        """Whether to trace it takes no run: another one had the same first step."""
        return self._first_step(program, batch_size, short) in self._first_steps

    def _first_step(
        self, program: Program, batch_size: int, short: Shortening | None
    ) -> _FirstStep | None:
        """Return what the first step depends on; None if it is run each time."""
        if program.compile != "none" or program.loop.kind != "run":
            return None
        return (
            program._replace(accumulates=False),
            batch_size,
            None if short is None else short.left_out,
            self.real_values,
            self.redirect_cuda,
        )

    def _once(self, step: _FirstStep | None, run: Callable[[], RawTrace]) -> RawTrace:
        if step is None:
            return run()
        if step not in self._first_steps:
            self._first_steps[step] = run().copy()  # which does not hold the model
        return self._first_steps[step].copy()

    def _options(
        self, program: Program, short: Shortening | None = None
    ) -> TraceOptions:
        blocks = self.workload.blocks if short is None else short.short_blocks
        return {
            "blocks": blocks,
            "target": self._target(program),
            "short": short,
            "real_values": self.real_values,
            "redirect_cuda": self.redirect_cuda,
            "checks": self._checks,
        }

    def _target(self, program: Program) -> CudaTarget:
        """Return the GPU, with what compiled code depends on where there is any."""
        target = self.workload.target
        if program.compile == "none":
            return target
        gpu = self.workload.gpu
        return replace(target, sm_count=gpu.sm_count, threads_per_sm=gpu.threads_per_sm)

    def _compiled_blocks(
        self, program: Program, *, uniform: bool
    ) -> CompiledBlocks | None:
        """Return the code that earlier traces for this GPU have generated."""
        if program.compile == "none":
            return None
        target, whole_model = self._target(program), program.compile == "model"
        key = target, uniform, whole_model
        if key not in self._compiled:
            self._compiled[key] = CompiledBlocks(
                target, uniform=uniform, whole_model=whole_model
            )
        return self._compiled[key]

    def _failure(self, error: Exception, batch_size: int) -> BudgetfitError | None:
        """Turn on what the model needs to run, or return what to raise."""
        # Real values need a model that is small enough to be run with them. A larger
        # batch may fail only because it has too many values to propagate.
        if isinstance(error, BudgetfitError):
            return error
        if self._checks.deny(error):
            self.log.append(f"answered with no from here on: {error}")
            return None
        if isinstance(error, RuntimeError) and self._checks.empty_opposites():
            self.log.append(f"opposites of full masks are empty from here on: {error}")
            return None
        if not self.redirect_cuda and "cuda" in str(error).lower():
            self.redirect_cuda = True
            return None
        if (
            isinstance(error, UnknownValueError)
            and not self.real_values
            and batch_size <= max(TRACED_BATCH_SIZES)
            and weights_bytes(self.workload.model) <= MAX_WEIGHTS_BYTES
        ):
            self.log.append(f"real values from here on: {error}")
            self.real_values = True
            return None
        workload = self.workload
        return trace_error(
            workload.model,
            error,
            is_sparse=has_sparse_tensors(workload.batch),
            made=describe_batch(workload.batch) if workload.remake else None,
        )
