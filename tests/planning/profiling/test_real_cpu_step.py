"""A replay with a CPU's semantics is a real step on a CPU, to the byte (law D6)."""

import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.batches.batch_tree import map_batch, resize_batch
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.tracing.recording.steady_state import append_steady_step
from budgetfit.tracing.recording.storage_log import StorageLog
from tests.models import EXAMPLES, WITHOUT_LOSS, mean
from tests.traced import raw_trace, session

BATCH = 3
STEPS = 2  # the first creates states, the second meets them


class Measured(NamedTuple):
    """Unrounded bytes in one phase: the most alive, and those alive at its end."""

    phase: str
    step: int
    micro_step: int
    peak_bytes: int
    end_bytes: int


def predicted(raw: RawTrace) -> list[Measured]:
    """Add up a trace, phase by phase."""
    live = 0
    after = [0]
    for event in raw.log.events:
        size = raw.log.sizes[abs(event) - 1]
        live += size if event > 0 else -size
        after.append(live)
    return [
        Measured(
            row.name,
            row.step,
            row.micro_step,
            max(after[row.start : row.end + 1]),
            after[row.end],
        )
        for row in raw.phases
    ]


def real(name: str, recipe: Recipe) -> list[Measured]:
    """Train an example for two steps and watch every storage."""
    batch = resize_batch(EXAMPLES[name].batch, recipe.batch_size)
    loss = mean if name in WITHOUT_LOSS else None
    return measured(EXAMPLES[name].model(), batch, recipe, loss, STEPS)


def measured(
    model: nn.Module, batch: Any, recipe: Recipe, loss: Any, steps: int
) -> list[Measured]:
    """Train for some steps and watch every storage."""
    micro_steps = recipe.gradient_accumulation_steps
    log = StorageLog()
    found: list[Measured] = []
    open_phase = ("setup", -1, 0)

    def begin(phase: str) -> None:
        nonlocal open_phase
        if phase == open_phase[0] == "forward":
            return  # begun with the batch
        found.append(Measured(*open_phase, log.peak_bytes, log.live_bytes))
        log.reset_peak()
        open_phase = (phase, step, micro_step)

    step = micro_step = -1  # read where a phase begins
    gc.collect()
    gc.disable()
    try:
        with log:
            for tensor in (*model.parameters(), *model.buffers()):
                log.log_storage(tensor)
            run = Run(
                model, recipe, loss=loss, on_phase=begin, determinism_check="default"
            )
            for step in range(steps):  # noqa: B007 - ``begin`` reads it
                for micro_step in range(micro_steps):  # noqa: B007 - so here
                    begin("forward")
                    run.step(map_batch(batch, torch.clone))
            begin("end")
    finally:
        gc.enable()
    return found


def plans(name: str) -> Iterator[tuple[str, tuple[Segment, ...]]]:
    blocks = session(name).workload.blocks
    yield "kept", ()
    yield "recomputed", checkpoint_every_block(blocks)
    yield "a segment of two", (Segment(blocks[-2:]),)
    yield "nested", (Segment(blocks[-2:], nested=True),)
    yield "offloaded", (Segment(blocks[:1], "offload"), Segment(blocks[-1:]))
    yield "input on the host", tuple(Segment((b,), input_on_host=True) for b in blocks)
    yield (
        "selective",
        tuple(
            Segment((b,), "selective", saved_ops=SAVED_OPS.get(name, PRODUCTS))
            for b in blocks
        ),
    )


PRODUCTS = ("aten.addmm.default:0", "aten.addmm.default:2")
SAVED_OPS = {"t5": ("aten.mm.default:1", "aten.bmm.default:0")}


CASES = [
    *(
        (name, plan)
        for name in ("gpt2", "t5", "vit")
        for plan in ("kept", "recomputed", "a segment of two", "selective")
    ),
    *(
        (name, plan)
        for name in ("gpt2", "t5")
        for plan in ("nested", "offloaded", "input on the host")
    ),
    ("transformer", "a segment of two"),
    ("convolutions", "recomputed"),
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_live_bytes_of_a_replay_are_those_of_a_real_step(name: str, plan: str) -> None:
    recipe = Recipe(batch_size=BATCH, segments=dict(plans(name))[plan])
    raw = raw_trace(name, recipe, target=None)
    append_steady_step(raw)
    assert predicted(raw) == real(name, recipe)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(batch_size=BATCH, precision="bf16-mixed", optimizer="sgd"),
        Recipe(batch_size=BATCH, precision="bf16"),
        Recipe(batch_size=BATCH, gradient_accumulation_steps=2),
        Recipe(batch_size=BATCH, optimizer="adafactor"),
    ],
    ids=str,
)
def test_precision_accumulation_and_optimizer_are_in_the_replay(recipe: Recipe) -> None:
    raw = raw_trace("gpt2", recipe, target=None, steps=STEPS)
    assert predicted(raw) == real("gpt2", recipe)
