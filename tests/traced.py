"""Traces that several test files share: each program is traced once for all of them."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.core.budget import Budget
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import CATEGORIES, StepTrace
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.profiling.block_chain import (
    BlockChain,
    TrainingSettings,
    checkpoint_every_block,
)
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.tracing.recording.step_tracer import trace_step
from budgetfit.workload.workload import Workload
from tests.models import EXAMPLES, without_loss

ADA, T4, HOPPER = "rtx-4090", "t4", "h100-80gb"
ROOMY = Budget(total_bytes=2**60, context_bytes=0, headroom_bytes=0)

# Every architecture once; every precision and every card several times.
PAIRS = {
    "gpt2": (T4, "fp16-mixed"),
    "llama": (ADA, "bf16-mixed"),
    "mixtral": (HOPPER, "bf16"),
    "bert": (ADA, "bf16-mixed"),
    "t5": (T4, "fp16-mixed"),
    "vit": (ADA, "fp32"),
    "convolutions": (ADA, "bf16-mixed"),
    "transformer": (HOPPER, "bf16-mixed"),
}


@functools.cache
def session(name: str, gpu: str = ADA) -> TraceSession:
    """Return the traces of one of ``EXAMPLES`` on a card."""
    example = EXAMPLES[name]
    workload = Workload(model=example.model(), batch=example.batch, gpu=find_gpu(gpu))
    return TraceSession(workload.with_found_blocks())


@functools.cache
def chains(name: str, gpu: str, precision: str, accumulation: int = 1) -> BlockChain:
    """Return the chains of an example under adamw_torch_fused."""
    setting = TrainingSettings(
        precision=precision, optimizer="adamw_torch_fused", accumulation=accumulation
    )
    return BlockChain(session(name, gpu), setting)


def line(
    name: str, gpu: str = ADA, precision: str = "fp32", *, recompute: bool = False
) -> StepTrace:
    """Return the trace, for all batch sizes, with all blocks kept or all recomputed."""
    traces = session(name, gpu)
    segments = checkpoint_every_block(traces.workload.blocks) if recompute else ()
    return traces.affine(Recipe(batch_size=8, precision=precision, segments=segments))


def trace_module(
    model: nn.Module,
    batch: object,
    recipe: Recipe,
    *,
    target: CudaTarget | None,
    blocks: tuple[str, ...] = (),
    steps: int = 1,
    **options: Any,
) -> RawTrace:
    """Trace optimizer steps of a model; ``options`` are those of a ``Run``."""
    return trace_step(
        model,
        lambda copied, on_phase: Run(
            copied,
            recipe,
            on_phase=on_phase,
            on_missing_loss=without_loss,
            blocks=blocks,
            **options,
        ),
        batch,
        batch_size=recipe.batch_size,
        blocks=blocks,
        target=target,
        micro_steps=recipe.gradient_accumulation_steps,
        steps=steps,
        parallelism=recipe.parallelism,
    )


def raw_trace(
    name: str,
    recipe: Recipe,
    *,
    target: CudaTarget | None,
    steps: int = 1,
    blocks: tuple[str, ...] | None = None,
    optimizer: object = None,
) -> RawTrace:
    """Trace ``steps`` optimizer steps of a recipe; nothing is scaled or repeated."""
    example = EXAMPLES[name]
    return trace_module(
        example.model(),
        example.batch,
        recipe,
        target=target,
        blocks=session(name).workload.blocks if blocks is None else blocks,
        steps=steps,
        optimizer=optimizer,
    )


def storage_events(
    raw: RawTrace, known: Callable[[int], object]
) -> list[tuple[Any, ...]]:
    """Return all events, phase by phase, with what is known of their storages.

    ``known``: what else, by the storage's number.
    """
    log = raw.log
    return [
        (
            phase.name,
            phase.step,
            phase.micro_step,
            "malloc" if event > 0 else "free",
            log.sizes[abs(event) - 1],
            CATEGORIES[log.categories[abs(event) - 1]],
            log.scratch.get(abs(event) - 1),
            known(abs(event) - 1),
        )
        for phase in raw.phases
        for event in log.events[phase.start : phase.end]
    ]


def neighbours(name: str, first: int, count: int) -> tuple[Segment, ...]:
    """Return one segment of ``count`` neighbouring blocks of an example."""
    blocks = session(name).workload.blocks
    return (Segment(blocks[first : first + count]),)
