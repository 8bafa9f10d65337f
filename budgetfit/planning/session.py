"""``PlanningSession``: all that a plan in one precision is searched and judged with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict, Unpack

from budgetfit.applying.optimizers.factory import steps_on_cpu
from budgetfit.applying.precision import DTYPES
from budgetfit.core.budget import Budget
from budgetfit.core.parallelism import Parallelism
from budgetfit.core.plan import Estimate
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import CompileMode, Recipe
from budgetfit.core.step_trace import StepTrace
from budgetfit.core.validation import MAX_BATCH_SIZE
from budgetfit.errors import TraceError
from budgetfit.gpus.nccl_memory import nccl_memory
from budgetfit.gpus.table import Gpu
from budgetfit.memory.chain.peak import optimizer_step_bytes
from budgetfit.memory.replay import UNLIMITED_BYTES, replay, setup_fits
from budgetfit.planning.judge import judge
from budgetfit.planning.profiling.block_chain import (
    BlockChain,
    TrainingSettings,
    checkpoint_every_block,
)
from budgetfit.planning.profiling.first_trace import block_chain_per_precision
from budgetfit.solvers.batch_size import Objective
from budgetfit.solvers.batch_size_grid import LARGEST_BATCH_SIZE, LARGEST_TRACED_SIZE
from budgetfit.traces.depth_extrapolator import DepthChecks
from budgetfit.traces.session import TraceSession
from budgetfit.traces.tracer import TRACED_BATCH_SIZES
from budgetfit.workload.workload import Workload

Checkpointing = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The requested checkpointing, objective and batch size, and the memory for them.

    ``checkpointing`` is a policy's name or block names; a ``batch_size`` of None is
    solved for. ``budget``: what has to hold it, of each rank its own.
    """

    budget: Budget
    checkpointing: Checkpointing = "auto"
    objective: Objective = "throughput"
    batch_size: int | None = None


class SessionSettings(TypedDict):
    """The further arguments of ``make_plan``.

    Without an effective batch size the plan takes one micro-batch per optimizer step.
    ``parallelisms`` are the ways to use several GPUs, to choose from; none: one GPU.
    ``fallback_precision`` is for models that cannot run in the first of ``precisions``;
    a warning says so. ``progress`` is called with a line of text for each longer piece
    of work. ``depth_checks``: those of several plans of one model.
    """

    precisions: Sequence[str]
    optimizer: str
    effective_batch_size: NotRequired[int | None]
    optimizer_in_backward: NotRequired[bool]
    compile: NotRequired[CompileMode]
    parallelisms: NotRequired[Sequence[Parallelism]]
    fallback_precision: NotRequired[str | None]
    progress: NotRequired[Callable[[str], None] | None]
    depth_checks: NotRequired[DepthChecks]


@dataclass(frozen=True, slots=True)
class PlanningSession:
    """A workload's block chain, and what is asked for.

    Sessions of other requests share the block chain, and those of other settings its
    traces. ``notes``: what is not planned for, as warnings.
    """

    block_chain: BlockChain
    request: Request
    notes: tuple[str, ...] = ()

    @property
    def budget(self) -> Budget:
        """What the settings have to fit into."""
        return self.request.budget

    @property
    def traces(self) -> TraceSession:
        """The traces of the workload."""
        return self.block_chain.traces

    @property
    def workload(self) -> Workload:
        """The model, its batch and the GPU."""
        return self.traces.workload

    @property
    def settings(self) -> TrainingSettings:
        """The settings that are not searched for."""
        return self.block_chain.settings

    @property
    def smallest_batch(self) -> int:
        """The requested batch size, or the smallest that the model runs at."""
        # Looked for with what is judged at that size anyway: with every block
        # recomputed, where that may be chosen and runs.
        if self.request.batch_size is not None:
            return self.request.batch_size
        if self.request.checkpointing == "auto":
            every_block = checkpoint_every_block(self.workload.blocks)
            recomputed = self.settings.recipe(1, every_block)
            with contextlib.suppress(TraceError):
                return self._whole_part(self.traces.smallest_batch(recomputed))
        kept = self.settings.recipe(1)
        return self._whole_part(self.traces.smallest_batch(kept))

    @property
    def smallest_searched(self) -> int:
        """The same for searches by formula; 1 where no trace has said that is wrong."""
        return self.request.batch_size or self._whole_part(
            self.traces.smallest_searched(self._measured)
        )

    @property
    def largest_searched(self) -> int:
        """The largest batch size of a search."""
        if self.request.batch_size is None and self.traces.is_affine(self._measured):
            return min(LARGEST_BATCH_SIZE, self.largest_taken)
        return LARGEST_TRACED_SIZE

    @property
    def largest_taken(self) -> int:
        """The largest batch size that the kernels take, as far as a trace says."""
        if self.request.batch_size is not None:
            return MAX_BATCH_SIZE
        return self.traces.largest_batch(self._measured, MAX_BATCH_SIZE)

    @property
    def _measured(self) -> Recipe:
        """A recipe that a search traces anyway: a chunked loss with all recomputed."""
        chunked = self.settings.loss_chunks > 1
        segments = checkpoint_every_block(self.workload.blocks) if chunked else ()
        return self.settings.recipe(TRACED_BATCH_SIZES[0], segments)

    def _whole_part(self, smallest: int) -> int:
        """Return the least divisor of the effective batch size from a size on."""
        whole = self.settings.effective_batch_size
        if whole is None:
            return smallest
        sizes = (size for size in range(smallest, whole) if whole % size == 0)
        return next(sizes, whole)

    @property
    def optimizer_step_fits(self) -> bool:
        """Whether the optimizer step fits, whatever is recomputed."""
        plain = self.block_chain.without_options
        size = self.smallest_searched
        if plain.optimizer_bytes(size) > self.budget.usable_bytes:
            return False  # without the trace with every block recomputed
        chain = plain.profile_at(size, exact_blocks=False)
        return optimizer_step_bytes(chain) <= self.budget.usable_bytes

    @property
    def may_fit(self) -> bool:
        """Whether all fits that does not depend on recomputation or offload."""
        return self.setup_fits and self.optimizer_step_fits

    @property
    def setup_fits(self) -> bool:
        """Whether loading and moving the model fit: what comes before the steps."""
        size = self.smallest_searched
        trace = self.block_chain.without_options.all_kept(size)
        return setup_fits(trace, size, self.workload.gpu, self.budget)

    @property
    def base_loads(self) -> bool:
        """Whether loading a quantised base fits: before any choice of training."""
        parallelism = self.settings.parallelism
        if parallelism is not None and parallelism.engine != "ddp":
            return True  # not in its traces
        budget, card_bytes = self.budget, self.workload.gpu.total_bytes
        return self.traces.loading.fits(
            budget.usable_bytes, budget.allocator, card_bytes
        )

    @property
    def offloads(self) -> bool:
        """Whether weights and optimizer are in host memory."""
        parallelism = self.settings.parallelism
        return parallelism is not None and parallelism.cpu_offload

    @property
    def host_may_hold(self) -> bool:
        """Whether the host's memory may hold weights and gradients that are there."""
        parallelism, limit = self.settings.parallelism, self.budget.host_ram_bytes
        if parallelism is None or not self.offloads or limit is None:
            return True
        return limit >= sum(
            shard_bytes(self, parallelism, trained=trained) for trained in (False, True)
        )

    def judge(self, recipe: Recipe, trace: StepTrace | None = None) -> Estimate:
        """Trace a recipe as applied to a fake copy of the model, and replay it.

        ``trace``: instead of the model's.
        """
        return judge(
            self.traces.exact(recipe) if trace is None else trace,
            recipe,
            self.workload.gpu,
            self.budget,
            context_bytes=self.budget.context_bytes,
            notes=self.workload.notes,
        )

    def asking(self, **changes: Any) -> PlanningSession:
        """Return the session with other fields of the request."""
        return replace(self, request=replace(self.request, **changes))

    def changed(self, **settings: Any) -> PlanningSession:
        """Return the session with other training settings."""
        chain = BlockChain(self.traces, replace(self.settings, **settings))
        return replace(self, block_chain=chain)

    def with_expandable_segments(self) -> PlanningSession:
        """Return the session whose allocator makes expandable segments."""
        budget = self.budget.with_expandable_segments()
        return self.changed(allocator=budget.allocator).asking(budget=budget)

    def with_parallelism(self, parallelism: Parallelism) -> PlanningSession:
        """Return the session with other settings of the same ranks, without traces."""
        traces = self.traces.of_same_model(self.workload)
        settings = replace(self.settings, parallelism=parallelism)
        nccl = nccl_memory(parallelism.gpus, parallelism.communicators)
        there = self.asking(budget=replace(self.budget, nccl=nccl))
        return replace(there, block_chain=BlockChain(traces, settings))

    def on_gpu(self, gpu: Gpu, budget: Budget) -> PlanningSession:
        """Return the session on another GPU of the same compute capability."""
        if self.settings.parallelism is not None:
            budget = budget_of_rank(budget, self.settings.parallelism)
        settings = replace(
            self.settings,
            host_ram_bytes=budget.host_ram_bytes,
            allocator=budget.allocator,
        )
        chain = BlockChain(self.traces.for_gpu(gpu), settings)
        return replace(self.asking(budget=budget), block_chain=chain)

    def best_fitting(self, estimates: Iterable[Estimate]) -> Estimate | None:
        """Return the best estimate that fits, by the objective; else None."""
        fitting = [each for each in estimates if each.fits]
        return min(fitting, key=self.rank, default=None)

    def rank(self, estimate: Estimate) -> tuple[float, ...]:
        """Return the sort key of an estimate under the objective: lower is better."""
        return rank(estimate, self.request.objective)


def rank(estimate: Estimate, objective: Objective) -> tuple[float, ...]:
    """Return the sort key of an estimate under an objective: lower is better."""
    recipe = estimate.recipe
    per_sample = estimate.step_ms / recipe.effective_batch_size
    return {
        "throughput": (per_sample, estimate.reserved_bytes),
        "batch_size": (-recipe.batch_size, per_sample),
        "memory": (estimate.reserved_bytes, per_sample),
    }[objective]


def open_sessions(
    workload: Workload,
    request: Request,
    *,
    sizes: Sequence[int | None] = (None,),
    failed: TraceError | None = None,
    **settings: Unpack[SessionSettings],
) -> list[PlanningSession]:
    """Trace a model for the first time; return a session in each precision.

    They share their traces, but for those of other parallelisms. An engine that cannot
    train the model is left out where another can. ``sizes``: the batch sizes to trace
    first, in turn until one runs; None is a trace for all sizes, of two and three
    samples. ``failed``: why the model does not run with those; it is planned for the
    one of ``sizes``, with a note.

    Raises:
        InputError: If no tensor grows with the batch size.
        TraceError: If the model cannot be traced.
    """
    asked = settings.get("parallelisms") or (None,)
    found: list[PlanningSession] = []
    left_out: dict[str, TraceError] = {}  # by engine
    traces = TraceSession(
        workload,
        settings.get("progress"),
        depth_checks=settings.get("depth_checks"),
    )
    for parallelism in _worth_tracing(traces, request.budget, asked, settings):
        if parallelism is not None and parallelism.engine in left_out:
            continue
        # What holds more runs where what holds less does, as does what is offloaded.
        known = [each.settings.parallelism for each in found]
        alike = (
            row
            for row in known
            if parallelism in holding_more(row) or _offloads(row, parallelism)
        )
        like = next(alike, None)
        if parallelism is not None and like is not None:
            found += [
                each.with_parallelism(parallelism)
                for each, row in zip(tuple(found), known, strict=True)
                if row == like and (not parallelism.cpu_offload or _can_offload(each))
            ]
            continue
        try:
            found += _sessions_of(
                traces,
                request,
                parallelism,
                settings,
                sizes,
                failed,
            )
        except TraceError as error:
            if parallelism is None:
                raise
            left_out[parallelism.engine] = error
    if not found:
        raise next(iter(left_out.values()))
    notes = tuple(f"engine {name} is left out: {left_out[name]}" for name in left_out)
    found = [replace(each, notes=(*each.notes, *notes)) for each in found]
    if request.checkpointing == "as-is":
        own = found[0].workload.own_checkpointing()
        found = [each.asking(checkpointing=own) for each in found]
    return found


def holding_more(parallelism: Parallelism | None) -> tuple[Parallelism, ...]:
    """Return settings of the same engine and ranks that hold more on each."""
    # FSDP2 keeps the weights after the forward, shards within each node only (HSDP), or
    # reduces gradients in the last micro-batch alone; DeepSpeed has a second bucket
    # where its collectives overlap. None where settings hold as much already.
    if parallelism is None or parallelism.engine == "ddp":
        return ()
    if parallelism.engine == "deepspeed":
        more = replace(parallelism, overlap_comm=True)
        return () if parallelism.overlaps else (more,)
    freed, per_node = parallelism.reshard_after_forward, parallelism.gpus_per_node
    groups = {parallelism.shard}
    if parallelism.shard is None and parallelism.nodes > 1 and per_node != 1:
        groups.add(per_node)
    others = (
        replace(
            parallelism,
            reshard_after_forward=kept,
            shard=shard,
            sync_each_batch=each,
        )
        for shard in groups
        for kept in {freed, False}
        for each in {parallelism.sync_each_batch, False}
    )
    return tuple(other for other in others if other != parallelism)


def _can_offload(session: PlanningSession) -> bool:
    """Whether weights can train in host memory, where no GradScaler unscales."""
    settings = session.settings
    scales = find_precision(settings.precision).grad_scaler
    return not scales and steps_on_cpu(settings.optimizer)


def _offloads(one: Parallelism | None, other: Parallelism | None) -> bool:
    """Whether the other offloads shards that ``fully_shard`` keeps on the GPU."""
    if one is None or other is None:
        return False
    return other.cpu_offload and not one.cpu_offload and one.engine == "fsdp2"


def shard_bytes(
    session: PlanningSession, parallelism: Parallelism, *, trained: bool
) -> int:
    """Return the bytes of a rank's shards of the weights, or of those it trains."""
    # ``fully_shard`` cuts along the first dimension; the first ranks have the most.
    ranks = parallelism.gpus // parallelism.replicate
    weights = find_precision(session.settings.precision).weights
    dtype = None if weights == "as-is" else DTYPES[weights]
    total = 0
    for each in session.workload.model.parameters():
        if not (trained and not each.requires_grad):
            length = each.shape[0] if each.dim() else 1
            size = each.element_size()
            if dtype is not None:
                cast = each.requires_grad and each.is_floating_point()
                size = dtype.itemsize if cast else min(size, dtype.itemsize)
            total += -(-length // ranks) * (each.numel() // max(1, length)) * size
    return total


def _worth_tracing(
    traces: TraceSession,
    budget: Budget,
    parallelisms: Sequence[Parallelism | None],
    settings: SessionSettings,
) -> Sequence[Parallelism | None]:
    """Leave out DDP where the optimizer step of one GPU does not fit, unless alone."""
    # Each rank holds all that one GPU would: weights, gradients and optimizer states.
    # The trace of one GPU is much cheaper than those of DDP.
    copied = [each for each in parallelisms if each and each.engine == "ddp"]
    others = [each for each in parallelisms if each not in copied]
    if not others or not copied:
        return parallelisms
    usable_bytes = budget_of_rank(budget, copied[0]).usable_bytes
    for precision in settings["precisions"]:
        one = TrainingSettings(precision=precision, optimizer=settings["optimizer"])
        try:
            trace = traces.affine(one.recipe(TRACED_BATCH_SIZES[0]))
        except TraceError:
            return parallelisms
        whole = replay(
            trace,
            TRACED_BATCH_SIZES[0],
            traces.workload.gpu,
            limit_bytes=UNLIMITED_BYTES,
            settings=budget.allocator,
            breakdown=False,
        )
        if whole.floor_bytes <= usable_bytes:
            return parallelisms
    return others


def budget_of_rank(budget: Budget, parallelism: Parallelism) -> Budget:
    """Return the budget with NCCL's memory set aside, and a share of the host's."""
    nccl = nccl_memory(parallelism.gpus, parallelism.communicators)
    host = budget.host_ram_bytes
    if host is not None:
        host //= parallelism.gpus // parallelism.nodes
    return replace(budget, nccl=nccl, host_ram_bytes=host)


def _sessions_of(  # noqa: PLR0913, PLR0917 - those of ``open_sessions``
    traces: TraceSession,
    request: Request,
    parallelism: Parallelism | None,
    settings: SessionSettings,
    sizes: Sequence[int | None],
    failed: TraceError | None,
) -> list[PlanningSession]:
    """Return the sessions of one parallelism, with NCCL's memory set aside."""
    if parallelism is not None:
        of_rank = budget_of_rank(request.budget, parallelism)
        request = replace(request, budget=of_rank)
    precisions = settings["precisions"]
    first: TraceError | None = None
    for only_at in sizes:
        try:
            chains = block_chain_per_precision(
                traces,
                precisions,
                TrainingSettings(
                    precision=precisions[0],
                    optimizer=settings["optimizer"],
                    effective_batch_size=settings.get("effective_batch_size"),
                    optimizer_in_backward=settings.get("optimizer_in_backward", False),
                    compile=settings.get("compile", "none"),
                    host_ram_bytes=request.budget.host_ram_bytes,
                    allocator=request.budget.allocator,
                    parallelism=parallelism,
                ),
                settings.get("fallback_precision"),
                only_at=only_at,
            )
        except TraceError as error:
            first = first or error
            continue
        notes: tuple[str, ...] = ()
        if failed is not None:
            if request.batch_size is None:
                text = f"planned for {only_at} samples at a time, as the example has"
                notes = (f"{text}: {failed}",)
            request = replace(request, batch_size=only_at)
        return [PlanningSession(chain, request, notes) for chain in chains]
    assert first is not None  # noqa: S101 - every size has failed
    raise first
