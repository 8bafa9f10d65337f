"""The second micro-batch, made from the first, is the one that would come."""

from dataclasses import replace
from typing import Any

import pytest

from budgetfit.core.parallelism import Parallelism
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import Phase
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.op_costs import OpCost
from budgetfit.tracing.recording.gradient_log import GradientLog, GradientRecord
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.tracing.recording.second_micro_batch import append_micro_batch
from budgetfit.tracing.recording.storage_log import StorageLog
from budgetfit.tracing.records import OpRecord
from tests.traced import raw_trace, storage_events

# HSDP holds what it has reduced to the end of the backward: its micro-batches are run.
EACH = Parallelism(engine="fsdp2", gpus=8, sync_each_batch=True)
ADA = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13))


def both(name: str, recipe: Recipe) -> tuple[RawTrace, RawTrace]:
    """Return one micro-batch with its repetition, and two that were really traced."""
    repeated = raw_trace(name, recipe, target=ADA)
    assert repeated.gradients is not None
    assert repeated.gradients.suffice
    append_micro_batch(repeated, repeated.gradients)
    two = replace(recipe, gradient_accumulation_steps=2)
    return repeated, raw_trace(name, two, target=ADA)


def rows_of(raw: RawTrace) -> list[tuple[Any, ...]]:
    """Return all events with what is known of their storages, and which they are."""
    return storage_events(raw, lambda number: number)


RECIPES: dict[str, tuple[str, Recipe]] = {
    "gpt2": ("gpt2", Recipe(batch_size=2)),
    "gpt2 scaled": ("gpt2", Recipe(batch_size=2, precision="fp16-mixed")),
    "gpt2 mixed": ("gpt2", Recipe(batch_size=3, precision="bf16-mixed")),
    "gpt2 bf16": ("gpt2", Recipe(batch_size=2, precision="bf16")),
    "gpt2 recomputed": (
        "gpt2",
        Recipe(
            batch_size=2,
            precision="bf16-mixed",
            segments=(Segment(("transformer.h.0",)),),
        ),
    ),
    "foreach": ("mebi", Recipe(batch_size=2, optimizer="adamw_torch")),
    "nothing allocated by the step": ("mebi", Recipe(batch_size=2, optimizer="sgd")),
    "experts": ("mixtral", Recipe(batch_size=2, precision="bf16")),
    "encoder and decoder": ("t5", Recipe(batch_size=2, precision="fp16-mixed")),
    "buffers": ("convolutions", Recipe(batch_size=2)),
    "channels, scaled": ("convolutions", Recipe(batch_size=2, precision="fp16-mixed")),
    "channels, bf16": ("convolutions", Recipe(batch_size=2, precision="bf16")),
    "fsdp2": ("llama", Recipe(batch_size=2, parallelism=EACH)),
    "fsdp2, uneven": (
        "mebi",
        Recipe(batch_size=2, parallelism=replace(EACH, gpus=7), optimizer="sgd"),
    ),
    "fsdp2, policy, recomputed": (
        "gpt2",
        Recipe(
            batch_size=2,
            precision="bf16-mixed",
            parallelism=replace(EACH, param_dtype="bf16", reduce_dtype="fp32"),
            segments=(Segment(("transformer.h.0",)),),
        ),
    ),
    "fsdp2, kept, bf16": (
        "llama",
        Recipe(
            batch_size=2,
            precision="bf16",
            parallelism=replace(EACH, reshard_after_forward=False),
        ),
    ),
    "fsdp2, in host memory": (
        "llama",
        Recipe(
            batch_size=2,
            precision="bf16-mixed",
            parallelism=replace(EACH, cpu_offload=True, param_dtype="bf16"),
        ),
    ),
    "fsdp2, over two, scaled": (
        "llama",
        Recipe(
            batch_size=2,
            precision="fp16-mixed",
            parallelism=replace(EACH, reshard_after_forward=2),
        ),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_repeated_micro_batch_is_the_one_that_would_come(name: str) -> None:
    repeated, real = both(*RECIPES[name])
    assert rows_of(repeated) == rows_of(real)
    assert repeated.log.streams == real.log.streams
    assert repeated.phases == real.phases
    assert sorted(repeated.passes) == sorted(real.passes)
    ops = [
        [(op.name, op.event, op.cost) for op in raw.log.ops] for raw in (repeated, real)
    ]
    assert ops[0] == ops[1]


def test_a_storage_of_several_gradients_is_freed_once() -> None:
    """As FSDP2's: an op behind the reduction comes one event later, and not two."""
    log = StorageLog()
    log.sizes, log.categories, log.layers = [512, 1024], [0, 0], [-1, -1]
    log.events = [1, 2]  # the batch, and what two gradients are views of
    made, added, behind = (
        OpRecord(name, 2, -1, OpCost(0, 0, 0, 0, 1))
        for name in ("made", "added", "behind")
    )
    log.ops = [made, behind]
    phases = [
        Phase("forward", 0, 0, 0, 1),
        Phase("backward", 0, 0, 1, 2),
        Phase("optimizer", 0, 0, 2, 2),
    ]
    raw = RawTrace(2, log, [], ops_before_update=2, phases=phases)
    row = GradientRecord(1, 1, 2, 1, added, released=2)
    append_micro_batch(raw, GradientLog(log, [row, row._replace()]))
    places = [(op.name, op.event) for op in log.ops[2:]]
    last = len(log.events)
    assert places == [("made", last - 1), *[("added", last - 1)] * 2, ("behind", last)]
