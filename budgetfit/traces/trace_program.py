"""Trace training steps or an evaluation: the code that trains, run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch

from budgetfit.applying.loss.call_model import evaluate_batch
from budgetfit.applying.precision import cast_batch
from budgetfit.applying.pytree import map_tensors
from budgetfit.applying.run.run import Run
from budgetfit.applying.zero import check_deepspeed
from budgetfit.core.loop import RUN, Loop
from budgetfit.core.parallelism import ZERO_3, Parallelism
from budgetfit.core.plan import NO_LOSS
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.traces.loops.trace_loop import STEPS, trace_loop
from budgetfit.traces.loss_modules import FakedLoss
from budgetfit.tracing.compiled.compiled_blocks import CompiledBlocks
from budgetfit.tracing.fake.model_copy import silence_fake_tensor_log
from budgetfit.tracing.isolation.scalar_randomness import (
    LARGEST_DRAW,
    SMALLEST_DRAW,
    SMALLEST_DRAW_NOTE,
    scalar_draws_as,
)
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.tracing.recording.second_micro_batch import append_micro_batch
from budgetfit.tracing.recording.steady_state import append_steady_step, keeps_tensors
from budgetfit.tracing.recording.step_tracer import TraceOptions, trace_step
from budgetfit.tracing.values.value_checks import ValueChecks
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.workload.training_setup import TrainingSetup
from budgetfit.workload.workload import Workload

if TYPE_CHECKING:
    from budgetfit.applying.loss.call_model import Loss

# Of these the steps are not derived: DDP builds its buckets in the second, and ZeRO-3
# prefetches from the second on.
TRACED_STEPS: dict[str | None, int] = {"ddp": 3, "deepspeed": 2}
MICRO_STEPS = 2  # a third micro-batch does what the second did
EVALUATED_BATCHES = 2  # one after the other
NOTABLE_SHARE = 0.01  # of the trained bytes: less without a gradient is not noted
_SHOWN = 3  # of their names
# A Run and the trainers switch it off (transformers 5.23, ``TrainingArguments``).
_KEEP_GENERATION_CACHE = frozenset({"plain", "accelerate", "lightning"})

# Before it gives up, the allocator waits for such blocks (torch's
# CUDACachingAllocator.cpp, ``synchronize_and_free_events``).
_LATE_BLOCKS = (
    "DeepSpeed's streams: a block that two of them use is free when the slower one is "
    "done; where the host is ahead of the GPU more is reserved than predicted, as long "
    "as there is room"
)

_ADDS_PARAMETERS = (
    "The optimizer takes further parameters in a later step (add_param_group), and a "
    "run trains those that it had in the first. Give it all of them from the start, "
    "and those that are to wait a learning rate of zero; or keep your own loop, which "
    "estimate(..., loop='plain') is for."
)


def trace_recipe(  # noqa: PLR0913 - one value each, all needed
    trained: Workload | TrainingSetup,
    recipe: Recipe,
    *,
    own_checkpointing: bool = False,
    loop: Loop = RUN,
    compiled: CompiledBlocks | None = None,
    once: Callable[[Callable[[], RawTrace]], RawTrace] = lambda run: run(),
    **options: Unpack[TraceOptions],
) -> RawTrace:
    """Trace a recipe's first training step and the steady-state step after it.

    Args:
        trained: Model, batch, loss and optimizer.
        recipe: With the batch size to trace, and segments in paths of the traced model.
        own_checkpointing: Whether the model's own checkpointing stays on.
        loop: Around the steps; all but ``run`` train a ``Workload``.
        compiled: Code of earlier traces; compiled anew without.
        once: Runs the first step, or returns a copy of what it was before: gradient
            accumulation and later steps are derived from it.
        options: As for ``trace_step``.

    Raises:
        InputError: If the recipe compiles blocks, and that cannot be predicted here;
            or it is for DeepSpeed, which is not installed.
        Exception: What the model raises on fake tensors.
    """
    if recipe.compile != "none" and compiled is None:
        whole = recipe.compile == "model"
        compiled = CompiledBlocks(options["target"], whole_model=whole)
    check_deepspeed(recipe)
    program = _Training(trained, recipe, loop, own_checkpointing, compiled, options)
    with silence_fake_tensor_log():
        alike = has_equal_micro_batches(recipe.parallelism)
        if alike:
            raw = once(lambda: program.trace(1))
        else:
            micro_steps = min(recipe.gradient_accumulation_steps, MICRO_STEPS + 1)
            raw = program.trace(micro_steps)
        if options.get("only_forward"):
            return raw
        derives = loop.kind == "run" and alike
        if derives and raw.adds_parameters:
            raise InputError(_ADDS_PARAMETERS)
        keeps = derives and (keeps_tensors(raw) or raw.last_new_step > 1)
        if keeps:
            micro_steps = min(recipe.gradient_accumulation_steps, MICRO_STEPS)
            raw = program.trace(micro_steps, steps=raw.last_new_step + 1)
        elif not derives and raw.last_new_step >= STEPS:
            raw = program.trace(1, steps=raw.last_new_step + 1)
        elif derives and recipe.gradient_accumulation_steps > 1:
            if raw.gradients is not None and raw.gradients.suffice:
                append_micro_batch(raw, raw.gradients)
                raw.derived = True
            else:
                raw = program.trace(MICRO_STEPS)
    if loop.kind == "run" and recipe.engine not in TRACED_STEPS and not keeps:
        append_steady_step(raw)
    raw.notes.extend(compiled.notes if compiled else ())
    return raw


def has_equal_micro_batches(parallelism: Parallelism | None) -> bool:
    """Whether all micro-batches of an update do the same, but for added gradients."""
    # Elsewhere the last one alone reduces gradients, or buckets are made anew; HSDP
    # holds what it has reduced until the end of the backward.
    if parallelism is None:
        return True
    is_fsdp2 = parallelism.engine == "fsdp2"
    return is_fsdp2 and parallelism.sync_each_batch and parallelism.replicate == 1


class _Training(NamedTuple):
    """A training program; fields as the arguments of ``trace_recipe``."""

    trained: Workload | TrainingSetup
    recipe: Recipe
    loop: Loop
    own_checkpointing: bool
    compiled: CompiledBlocks | None
    options: TraceOptions

    def trace(self, micro_steps: int, steps: int | None = None) -> RawTrace:
        """Trace so many micro-batches, and note what was assumed.

        ``steps``: of a ``Run``, if not as many as the recipe needs.
        """
        assumed: list[str] = []
        no_loss = partial(assumed.append, NO_LOSS)
        run = self._loop if self.loop.kind != "run" else self._run
        steps = steps or _steps(self.recipe)
        raw = _with_most_blocks(
            lambda: run(micro_steps, steps, no_loss),
            len(self.options["blocks"]),
            self.options.get("checks") or ValueChecks(),
        )
        raw.notes.extend(dict.fromkeys(assumed))
        raw.notes.extend(_notes(self.recipe))
        raw.notes.extend(self._untrained_notes(raw))
        raw.notes.extend(self._unread_notes(raw))
        return raw

    def _unread_notes(self, raw: RawTrace) -> Iterator[str]:
        """Note what a wrapper's forward takes and drops, as by ``**kwargs``."""
        if raw.unread and self.compiled is None:  # whose kernels read without an op
            yield (
                f"nothing reads {_listed(raw.unread)} of the batch: where a model "
                "inside is to have it, the forward around it has to hand it on"
            )

    def _untrained_notes(self, raw: RawTrace) -> Iterator[str]:
        """Note that other batches may train more: heads that are used in turns."""
        # Elsewhere gradients are gone by the end of a backward pass, or sharded.
        complete = raw.gradients is not None and raw.gradients.complete
        taken = self.recipe.optimizer_in_backward or self.recipe.parallelism is not None
        if taken or not complete:
            return
        inside = tuple(f"{name}." for name in self.options["blocks"])  # LayerDrop
        sizes = {
            name: size
            for name, size in raw.without_gradient.items()
            if not name.startswith(inside)
        }
        total = sum(sizes.values())
        if not total:
            return
        parameters = self.trained.model.parameters()
        trained = sum(each.nbytes for each in parameters if each.requires_grad)
        if total > NOTABLE_SHARE * trained:
            yield (
                f"no gradient from the planned batch for {_listed([*sizes])}: if other "
                "batches train them, gradients and optimizer states of "
                f"{format_bytes(total)} of weights come on top. Plan with a batch or "
                "loss= that trains all"
            )

    def _loop(self, _: int, steps: int, no_loss: Callable[[], object]) -> RawTrace:
        return trace_loop(
            self.trained,
            self.recipe,
            self.loop,
            own_checkpointing=self.own_checkpointing,
            on_missing_loss=no_loss,
            steps=max(steps, STEPS),
            **self.options,
        )

    def _run(
        self, micro_steps: int, steps: int, no_loss: Callable[[], object]
    ) -> RawTrace:
        trained, recipe, options = self.trained, self.recipe, self.options
        loss = FakedLoss(trained.loss, trained.model)
        return trace_step(
            trained.model,
            lambda model, on_phase: Run(
                model,
                replace(recipe, gradient_accumulation_steps=micro_steps),
                loss=loss.loss,
                optimizer=trained.optimizer,
                on_phase=on_phase,
                keep_own_checkpointing=self.own_checkpointing,
                dims=trained.batch_dims,
                on_missing_loss=no_loss,
                simulated_device_type="cpu" if options["target"] is None else "cuda",
                blocks=options["blocks"],
                compile_forward=self.compiled.forward_of if self.compiled else None,
            ),
            trained.batch,
            batch_size=recipe.batch_size,
            dims=trained.batch_dims,
            micro_steps=micro_steps,
            steps=steps,
            parallelism=recipe.parallelism,
            copy_modules=loss.fake,
            also_runs=(trained.loss, trained.optimizer),
            **options,
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)


def _notes(recipe: Recipe) -> tuple[str, ...]:
    """Return what a trace of the recipe cannot know."""
    given = recipe.parallelism
    if given is None or given.engine != "deepspeed" or not given.overlaps:
        return ()
    return (_LATE_BLOCKS,)


def _steps(recipe: Recipe) -> int:
    """Return how many steps are traced; after one the next is derived."""
    prefetches = recipe.zero_stage == ZERO_3
    return TRACED_STEPS.get(recipe.engine, 1) + prefetches


def _with_most_blocks(
    trace: Callable[[], RawTrace], count: int, checks: ValueChecks
) -> RawTrace:
    """Trace with the assumed values under which most of the blocks run."""
    # Values are scalar draws (LayerDrop), and answers to questions (early exits), which
    # stay as they are in later traces with these ``checks``.
    with scalar_draws_as(LARGEST_DRAW) as largest:
        raw = trace()
    if largest.drawn and len(set(raw.blocks)) < count:
        with scalar_draws_as(SMALLEST_DRAW):
            other = _if_more_blocks(trace, raw)
        if other is not raw:
            raw = other
            raw.notes.append(SMALLEST_DRAW_NOTE)
    if checks.asked and not checks.says_no and len(set(raw.blocks)) < count:
        checks.says_no = True
        other = _if_more_blocks(trace, raw)
        checks.says_no = other is not raw
        raw = other
    return raw


def _if_more_blocks(trace: Callable[[], RawTrace], raw: RawTrace) -> RawTrace:
    """Trace again; return the new trace if more blocks run in it, else ``raw``."""
    try:
        other = trace()
    except Exception:  # noqa: BLE001 - it ran with the usual values
        return raw
    return other if len(set(other.blocks)) > len(set(raw.blocks)) else raw


def trace_evaluation(
    workload: Workload,
    recipe: Recipe,
    *,
    loop: Loop = RUN,
    **options: Unpack[TraceOptions],
) -> RawTrace:
    """Trace an evaluation loop under the recipe's precision and at its batch size.

    Arguments as ``trace_recipe``.

    Raises:
        Exception: What the model raises in evaluation mode.
    """
    loss = FakedLoss(workload.loss, workload.model)
    with silence_fake_tensor_log():
        return trace_step(
            workload.model,
            lambda model, on_phase: _Evaluation(
                Run(
                    model,
                    recipe,
                    on_phase=on_phase,
                    keep_own_checkpointing=loop.kind in _KEEP_GENERATION_CACHE,
                ),
                loss.loss,
                loop,
            ),
            workload.batch,
            batch_size=recipe.batch_size,
            dims=workload.batch_dims,
            micro_steps=EVALUATED_BATCHES,
            copy_modules=loss.fake,
            also_runs=(workload.loss,),
            **options,
        )


class _Evaluation:
    """An evaluation loop over ``EVALUATED_BATCHES`` batches.

    A loop of one's own holds the outputs until the next ones are assigned. Trainers
    drop them (transformers 5.23, ``Trainer.prediction_step`` with
    ``prediction_loss_only``; Lightning 2.6, ``validation_step`` returns none).
    accelerate turns those of autocast into fp32 (1.15, ``convert_outputs_to_fp32``).
    """

    def __init__(self, run: Run, loss: Loss | None, loop: Loop) -> None:
        self.optimizer = run.optimizer
        self._holds = loop.kind in {"run", "plain", "accelerate"}
        self._in_fp32 = loop.kind not in {"plain", "lightning"}
        self._run = run
        self._loss = loss
        self._outputs: Any = None
        self._left = EVALUATED_BATCHES

    def step(self, batch: object) -> None:
        """Evaluate one batch while the outputs of the previous one are still alive."""
        run = self._run
        policy = find_precision(run.recipe.precision)
        moved = cast_batch(batch, policy, run.device)
        run.model.eval()
        with torch.no_grad():
            with run.autocast():
                outputs = evaluate_batch(run.model, moved, self._loss)
            if policy.autocast is not None and self._in_fp32:
                outputs = map_tensors(outputs, _in_fp32)
            if self._holds:
                self._outputs = outputs
        self._left -= 1
        if not self._left:
            self._outputs = None


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    is_half = tensor.dtype in {torch.float16, torch.bfloat16}
    return tensor.float() if is_half else tensor
