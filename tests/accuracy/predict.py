"""What budgetfit predicts for a recorded case."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES
from budgetfit.core.allocator.settings import AllocatorSettings
from budgetfit.core.block_profile import ChainProfile
from budgetfit.core.memory_timeline import MemoryTimeline
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import StepTrace
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.peak import chain_peak_bytes
from budgetfit.memory.chain.profile import chain_profile
from budgetfit.memory.chain.stages import MeasuredChain, OptionTrace
from budgetfit.memory.replay import UNLIMITED_BYTES, device_properties, replay
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.traces.session import TraceSession
from budgetfit.utils.function_name import qualified_name
from budgetfit.workload.workload import Workload
from tests.accuracy.case import Case
from tests.accuracy.nulldriver.addresses import null_driver_addresses
from tests.accuracy.training import (
    OPTIMIZERS,
    allowed_attention,
    build_batch,
    build_model,
)
from tests.accuracy.well_formed import NULL_DRIVER

GIB = 2**30
EXAMPLE_SAMPLES = 2  # the second one of a padded batch is not padded


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Predicted and recorded peaks over all steps, in bytes.

    Errors are signed: above zero means predicted too much.
    """

    predicted_allocated: int
    recorded_allocated: int
    predicted_reserved: int
    recorded_reserved: int

    @property
    def allocated_error(self) -> float:
        """Of the allocated peak."""
        return self.predicted_allocated / self.recorded_allocated - 1

    @property
    def reserved_error(self) -> float:
        """Of the reserved peak."""
        return self.predicted_reserved / self.recorded_reserved - 1


@dataclass(frozen=True, kw_only=True)
class Comparison(Peaks):
    """The peaks of one case.

    ``formula_allocated`` is what the solver's formula of a chain says, where there is
    one: of a compiled model it is the prediction itself. ``retries`` count how often
    the allocator had to empty its cache.
    """

    case: Case
    formula_allocated: int
    predicted_retries: int
    recorded_retries: int

    @property
    def formula_error(self) -> float:
        """The chain formula against the judge, signed."""
        return self.formula_allocated / self.predicted_allocated - 1


def subject_of(case: Case, *, cudnn: bool) -> Workload:
    """The case's model on meta, with a batch of shapes and small integers."""
    workload = Workload(
        model=build_model(case.model, "meta"),
        batch=build_batch(case, EXAMPLE_SAMPLES),
        optimizer=None if case.optimizer in OPTIMIZER_NAMES else _optimizer(case),
        gpu=find_gpu(case.gpu),
        cudnn=cudnn,
    ).with_found_blocks()
    if not case.model.blocks:
        return workload
    blocks = [
        f"{path}.{name}"
        for path in case.model.blocks
        for name, _ in workload.model.get_submodule(path).named_children()
    ]
    return replace(workload, blocks=tuple(blocks))


def _optimizer(case: Case) -> Callable[..., torch.optim.Optimizer]:
    """The case's own optimizer, where transformers has no name for it."""
    return OPTIMIZERS[case.optimizer]


def recipe_of(
    case: Case, workload: Workload, segments: tuple[Segment, ...] = ()
) -> Recipe:
    """The case's settings as a recipe."""
    return Recipe(
        batch_size=case.batch_size,
        gradient_accumulation_steps=case.gradient_accumulation_steps,
        precision=case.precision,
        optimizer=qualified_name(workload.optimizer)
        if workload.optimizer
        else case.optimizer,
        segments=segments,
        compile=case.compile or "none",
    )


def segments_of(case: Case, workload: Workload) -> tuple[Segment, ...]:
    """What the case recomputes; see ``Case.checkpointing``."""
    if case.checkpointing == "keep":
        return ()
    if case.checkpointing == "recompute":
        return checkpoint_every_block(workload.blocks)
    chain = workload.model.get_submodule(case.model.chain)
    names = tuple(f"{case.model.chain}.{name}" for name, _ in chain.named_children())
    return (Segment(names[:2]), *checkpoint_every_block(names[2 : len(names) // 2]))


def judge(
    case: Case, workload: Workload, trace: StepTrace, origin: str
) -> MemoryTimeline:
    """Replay a trace of the case on its card, without a limit unless it runs out.

    The order of addresses is that of what recorded it.
    """
    limit = int(case.imitated_memory_gib * GIB) if case.runs_out else UNLIMITED_BYTES
    with null_driver_addresses() if origin == NULL_DRIVER else nullcontext():
        return replay(
            trace,
            case.batch_size,
            workload.gpu,
            limit_bytes=limit,
            settings=AllocatorSettings.parse(case.allocator),
            then_batch_sizes=case.batch_sizes[2:] if case.last_batch_size else (),
            micro_steps=case.gradient_accumulation_steps,
        )


@contextmanager
def cudnn_attention(enabled: bool) -> Iterator[None]:
    """Attention by cuDNN as it was switched when the case was recorded."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def chain_of(
    case: Case, workload: Workload, recipe: Recipe, look_up: Callable[..., StepTrace]
) -> ChainProfile:
    """The chain that the solver would plan the case with."""
    every = checkpoint_every_block(workload.blocks)
    recomputed = look_up(replace(recipe, segments=every)) if recipe.segments else None
    return chain_profile(
        look_up(replace(recipe, segments=())),
        OptionTrace(recomputed, every) if recomputed is not None else None,
        partial(
            MeasuredChain.of,
            batch_size=case.batch_size,
            device=device_properties(workload.gpu),
            settings=AllocatorSettings.parse(case.allocator),
        ),
    )


def compare(case: Case, recording: dict[str, Any]) -> Comparison:
    """Predict a recorded case by tracing it at its own batch size.

    Where the batch changes on the way, one trace has to hold for several sizes.
    """
    software = recording["software"]
    workload = subject_of(case, cudnn=software["cudnn_enabled"])
    traces = TraceSession(workload)
    look_up = partial(
        traces.affine if case.last_batch_size else traces.exact,
        # What ``Run`` switches off was on when this was recorded: the model as it is.
        keep_own_checkpointing=case.model.settings.get("use_cache", False),
    )
    recipe = recipe_of(case, workload, segments_of(case, workload))
    with cudnn_attention("cudnn" in software["sdpa"]), allowed_attention(case):
        trace = look_up(recipe)
        is_chain = case.compile != "model"  # that is one graph
        chain = chain_of(case, workload, recipe, look_up) if is_chain else None
    timeline = judge(case, workload, trace, recording["origin"])
    steps = [point for point in timeline.points if point.phase != "setup"]
    phases = [phase for step in recording["steps"] for phase in step]
    allocated = max(point.allocated_bytes for point in steps)
    return Comparison(
        case=case,
        predicted_allocated=allocated,
        recorded_allocated=max(phase["peak_allocated_bytes"] for phase in phases),
        predicted_reserved=max(point.reserved_bytes for point in steps),
        recorded_reserved=max(phase["peak_reserved_bytes"] for phase in phases),
        formula_allocated=chain_peak_bytes(chain, recipe.segments)
        if chain is not None
        else allocated,
        predicted_retries=timeline.retries,
        recorded_retries=recording["alloc_retries"],
    )
