"""Measure a plan for several GPUs on every rank, and keep the largest of all."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from budgetfit.applying.out_of_memory.error import free_memory
from budgetfit.applying.precision import computes_in
from budgetfit.applying.ranks import Ranks, check_started, is_first_rank
from budgetfit.applying.sharding import POLICY_DTYPES
from budgetfit.applying.zero import check_deepspeed
from budgetfit.batches.batch_tree import map_batch
from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.measuring.compare_gradients import (
    COMPARED_ON_CUDA,
    GradientCheck,
    check_gradients,
)
from budgetfit.measuring.preserve_model import preserved_model
from budgetfit.measuring.protocols import LiveBytes, MakeRun, TrainingRun
from budgetfit.measuring.real_step import MeasuredPhase, RealSteps, run_real_steps
from budgetfit.measuring.recomputed_blocks import recomputed_blocks
from budgetfit.traces.loss_modules import loss_modules_on
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.utils.copy_model import deepcopy_model
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.utils.lazy_import import lazy_import
from budgetfit.verification.cpu_timeline import cpu_timeline_if_possible
from budgetfit.verification.loss_in_parts import with_loss_compared
from budgetfit.workload.training_setup import TrainingSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRanks:
    """The largest measurements of all ranks, the same on each.

    Attributes:
        measured: Of each phase, step and total the largest of all ranks.
        gradients: The check with the largest difference; None: not compared.
        timeline: The predicted live bytes of rank 0 on a CPU; None on a GPU.
        notes: What was not checked, and how much the ranks differ.
    """

    measured: RealSteps
    gradients: GradientCheck | None
    timeline: MemoryTimeline | None
    notes: list[str]


def measure_ranks(
    plan: Plan, setup: TrainingSetup, steps: int, say: Callable[[str], None]
) -> MeasuredRanks:
    """Run real steps on all ranks, each of which calls this.

    The model stays as it is: copies are trained, as engines are not undone.

    Raises:
        InputError: If the process group is not the planned one, or DeepSpeed is not
            installed.
    """
    parallelism = plan.recipe.parallelism
    if parallelism is None:
        raise ValueError("the plan is for one GPU")
    check_started(parallelism)
    check_deepspeed(plan.recipe)
    notes: list[str] = []
    timeline = None
    on_cpu = setup.device.type == "cpu"
    if on_cpu and parallelism.engine == "deepspeed":
        notes.append(
            "Live bytes were not compared: DeepSpeed reduces gradients in other "
            "buffers on a CPU than on a GPU."
        )
    elif on_cpu and is_first_rank():  # a trace has a process group of its own
        say("replaying the step with the CPU's semantics")
        timeline = cpu_timeline_if_possible(plan, setup, notes)
    ranks = Ranks(parallelism, setup.device)
    setup = replace(setup, device=ranks.device)
    with (
        preserved_model(setup.model, ranks.device, weights=False, loss=setup.loss),
        warnings.catch_warnings(),
    ):
        # Of copies of the model, and of one that trains alone to compare with.
        warnings.filterwarnings("ignore", "The model stays (sharded|with DeepSpeed)")
        warnings.filterwarnings("ignore", ".* each of them a model of its own")
        measured, gradients = _measure(plan, setup, ranks, steps, say, notes)
    told = ranks.gather((timeline, notes))
    timeline = told[0][0]
    notes = list(dict.fromkeys(note for _, each in told for note in each))
    if on_cpu and timeline is None:
        measured = replace(measured, phases=())  # nothing is predicted for them
    every = ranks.gather(measured)
    return MeasuredRanks(
        measured=_largest(every),
        gradients=_worst(ranks.gather(gradients)),
        timeline=timeline,
        notes=[*notes, *_differences(every), *_reference(plan)],
    )


def _measure(  # noqa: PLR0913, PLR0917 - one value each, all needed
    plan: Plan,
    setup: TrainingSetup,
    ranks: Ranks,
    steps: int,
    say: Callable[[str], None],
    notes: list[str],
) -> tuple[RealSteps, GradientCheck | None]:
    """Measure this rank's steps, then compare gradients."""
    recipe, blocks = plan.recipe, plan.model.blocks
    batch = setup.resized_batch(recipe.batch_size)
    counted = setup.device.type == "cpu" and recipe.zero_stage is None
    free_memory(setup.device)
    with loss_modules_on(setup.device, setup.loss, setup.model) as loss_modules:
        say(f"running {steps} real steps of batch {recipe.batch_size} on each rank")
        copied = replace(setup, model=deepcopy_model(setup.model, {}))
        live_bytes = functools.partial(
            _live_bytes, recipe, (copied.model, *loss_modules), batch
        )
        measured = run_real_steps(
            copied.run_factory(recipe, blocks=blocks),
            batch,
            steps=steps,
            micro_steps=recipe.gradient_accumulation_steps,
            device=setup.device,
            live_bytes=live_bytes if counted else None,
            shorter=setup.shorter,
        )
        del copied, live_bytes
        free_memory(setup.device)
        say("comparing gradients with one process's")
        return measured, _compare(plan, setup, ranks, notes)


def _compare(
    plan: Plan, setup: TrainingSetup, ranks: Ranks, notes: list[str]
) -> GradientCheck | None:
    """Compare the reduced gradients with the mean over all ranks of plain ones."""
    # None where the unmodified model runs out of memory. Where the engine computes in
    # other dtypes than one process would, with its own without recomputation.
    recipe, blocks = plan.recipe, plan.model.blocks
    single = replace(recipe, gradient_accumulation_steps=1)
    size = single.batch_size
    if setup.device.type == "cuda":
        size = min(size, COMPARED_ON_CUDA)
    plain = replace(single, segments=(), compile="none")
    as_one = not _has_policy(recipe)
    if as_one:
        plain = replace(plain, parallelism=None)

    def on_copies(tried: Recipe, *, checks_values: bool = False) -> MakeRun:
        def made(on_phase: Callable[[str], None]) -> TrainingRun:
            copied = replace(setup, model=deepcopy_model(setup.model, {}))
            make = copied.run_factory(tried, blocks=blocks, checks_values=checks_values)
            return make(on_phase)

        return made

    batch = setup.resized_batch(size)
    found = None
    try:
        found = check_gradients(
            setup.model,
            on_copies(single, checks_values=True),
            on_copies(plain),
            batch,
            blocks=blocks,
            planned=recomputed_blocks(recipe),
            seed=ranks.rank,
            mean=ranks.mean if as_one else torch.Tensor.detach,
            loss=setup.loss,
            more_runs=0,
        )
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    if plain.loss_chunks == 1:
        return found
    # Where an engine runs, all ranks have to.
    matches = ranks.gather(found is not None and found.match)
    if found is None or not all(matches):
        return found
    return with_loss_compared(
        found,
        setup,
        on_copies,
        plain,
        batch,
        dtype=_computes_in(plain),
        notes=notes,
    )


def _computes_in(recipe: Recipe) -> torch.dtype:
    """Return the dtype of matrix products; a policy's takes the place of autocast's."""
    several = recipe.parallelism
    policy = None if several is None else POLICY_DTYPES[several.param_dtype]
    return policy or computes_in(find_precision(recipe.precision))


def _has_policy(recipe: Recipe) -> bool:
    """Whether the engine computes in dtypes of its own."""
    parallelism = recipe.parallelism
    return parallelism is not None and (
        parallelism.param_dtype is not None or parallelism.reduce_dtype is not None
    )


def _reference(plan: Plan) -> list[str]:
    if not _has_policy(plan.recipe):
        return []
    note = (
        "Gradients were compared with those of the same engine without recomputation: "
        "one process would compute in other dtypes than "
        + ("DeepSpeed." if plan.recipe.zero_stage else "MixedPrecisionPolicy's.")
    )
    return [note]


def log_existing(log: StorageLog, modules: Iterable[nn.Module], batch: object) -> None:
    """Log the tensors of modules and of a batch, which are there before the steps."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            log.log_storage(tensor, "parameters")

    def count(tensor: torch.Tensor) -> torch.Tensor:
        log.log_storage(tensor, "batch")
        return tensor

    map_batch(batch, count)


@contextlib.contextmanager
def _live_bytes(
    recipe: Recipe,
    modules: Sequence[nn.Module],
    batch: object,
) -> Iterator[LiveBytes]:
    """Count a rank's live bytes; those of FSDP2 from when it takes the weights on."""
    tracing = "budgetfit.tracing.recording.distributed"
    log = lazy_import(f"{tracing}.rank_log").RankLog()
    takes_weights = recipe.engine == "fsdp2"
    log_existing(log, modules[1:] if takes_weights else modules, batch)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if takes_weights:
            log.paused = True
            on_moves = lazy_import(f"{tracing}.fully_sharded").fully_shard_on_fakes
            stack.enter_context(on_moves(log))
        stack.enter_context(log)
        yield log


def _largest(every: Sequence[RealSteps]) -> RealSteps:
    """Return the largest measurements of all ranks."""
    first = every[0]
    phases: dict[tuple[int, str], MeasuredPhase] = {}
    for row in (row for each in every for row in each.phases):
        known = phases.get((row.step, row.phase), row)
        phases[row.step, row.phase] = replace(
            row,
            allocated_bytes=max(row.allocated_bytes, known.allocated_bytes),
            reserved_bytes=max(row.reserved_bytes, known.reserved_bytes),
        )
    processes = [each.last_process for each in every if each.last_process is not None]
    return replace(
        first,
        steps=min(each.steps for each in every),
        phases=tuple(phases.values()),
        process_bytes=_most(each.process_bytes for each in every),
        last_process=max(processes, key=lambda each: each.held_bytes, default=None),
        step_ms=tuple(map(max, zip(*(each.step_ms for each in every), strict=False))),
        out_of_memory=next(filter(None, (each.out_of_memory for each in every)), None),
        notes=tuple(dict.fromkeys(note for each in every for note in each.notes)),
        counted=max(every, key=_peak).counted,
        shorter_reserved_bytes=max(each.shorter_reserved_bytes for each in every),
        host_growth_bytes=_most(each.host_growth_bytes for each in every),
        pinned_bytes=_most(each.pinned_bytes for each in every),
    )


def _most(values: Iterator[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _peak(measured: RealSteps) -> int:
    return max((row.allocated_bytes for row in measured.phases), default=-1)


def _worst(every: Sequence[GradientCheck | None]) -> GradientCheck | None:
    """Return the check of the largest difference; None if one was not made."""
    found = [each for each in every if each is not None]
    if len(found) < len(every):
        return None
    worst = max(found, key=lambda each: (bool(each.refusal), each.max_error))
    return replace(
        worst,
        noise=max((each.noise for each in found), key=lambda x: (math.isnan(x), x)),
        recomputed_blocks=min(each.recomputed_blocks for each in found),
    )


def _differences(every: Sequence[RealSteps]) -> list[str]:
    peaks = [_peak(each) for each in every]
    low, high = min(peaks), max(peaks)
    if high < 0:
        return []
    found = (
        f"{format_bytes(high)} on each"
        if low == high
        else f"from {format_bytes(low)} (rank {peaks.index(low)}) to "
        f"{format_bytes(high)} (rank {peaks.index(high)})"
    )
    return [f"{len(every)} ranks were measured; the largest counts. Peaks: {found}."]
