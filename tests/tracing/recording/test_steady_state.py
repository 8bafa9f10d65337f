"""The second step, made from the first, is the second step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from budgetfit.core.recipe import Recipe
from budgetfit.gpus.table import find_gpu
from budgetfit.traces.trace_program import trace_recipe
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.tracing.recording.steady_state import append_steady_step
from budgetfit.utils.function_name import qualified_name
from budgetfit.workload.workload import Workload
from tests.models import momentum
from tests.traced import raw_trace, storage_events

ADA = CudaTarget(compute_capability=(8, 9), torch_version=(2, 13))
Optimizer = torch.optim.Optimizer


def amsgrad(parameters: ParamsT) -> Optimizer:
    return torch.optim.Adam(parameters, amsgrad=True, foreach=True)


def both(
    name: str, recipe: Recipe, optimizer: Callable[..., Optimizer] | None = None
) -> tuple[RawTrace, RawTrace]:
    """Return one step with its repetition, and two steps that were really traced."""
    repeated = raw_trace(name, recipe, target=ADA, optimizer=optimizer)
    append_steady_step(repeated)
    real = raw_trace(name, recipe, target=ADA, steps=2, optimizer=optimizer)
    return repeated, real


def rows_of(raw: RawTrace) -> list[tuple[Any, ...]]:
    """Return all events with all that is known of their storages, phase by phase."""
    return storage_events(raw, raw.log.layers.__getitem__)


RECIPES: dict[str, tuple[str, Recipe, Callable[..., Optimizer] | None]] = {
    "gpt2 fused": ("gpt2", Recipe(batch_size=2), None),
    "gpt2 scaled, accumulated": (
        "gpt2",
        Recipe(batch_size=2, precision="fp16-mixed", gradient_accumulation_steps=2),
        None,
    ),
    "gpt2 momentum": (
        "gpt2",
        Recipe(
            batch_size=2, precision="bf16-mixed", optimizer=qualified_name(momentum)
        ),
        momentum,
    ),
    "foreach": ("mebi", Recipe(batch_size=2, optimizer="adamw_torch"), None),
    "sgd": ("mebi", Recipe(batch_size=2, optimizer="sgd"), None),
    "rmsprop": ("mebi", Recipe(batch_size=2, optimizer="rmsprop"), None),
    "adagrad": ("mebi", Recipe(batch_size=2, optimizer="adagrad"), None),
    "amsgrad": (
        "mebi",
        Recipe(batch_size=2, optimizer=qualified_name(amsgrad)),
        amsgrad,
    ),
    "buffers, accumulated": (
        "convolutions",
        Recipe(batch_size=2, gradient_accumulation_steps=2),
        None,
    ),
    "scaled foreach": (
        "convolutions",
        Recipe(batch_size=2, precision="fp16-mixed", optimizer="adamw_torch"),
        None,
    ),
    "pure bf16": ("convolutions", Recipe(batch_size=2, precision="bf16"), None),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_repeated_step_is_the_step_that_would_come(name: str) -> None:
    repeated, real = both(*RECIPES[name])
    assert rows_of(repeated) == rows_of(real)
    assert repeated.log.events == real.log.events
    assert repeated.phases == real.phases
    assert repeated.passes == real.passes
    assert repeated.blocks == real.blocks
    # Momentum begins as a copy of the gradient: a first step computes less than others.
    assert repeated.log.ops == real.log.ops or name == "gpt2 momentum"


def test_adafactor_replaces_one_number_of_each_weight_and_nothing_else() -> None:
    # Its root mean square is a new scalar every time: 512 bytes that come and go are
    # left out of the repetition, as they are of the first step.
    recipe = Recipe(batch_size=2, optimizer="adafactor")
    repeated, real = both("mebi", recipe)

    def without_numbers(raw: RawTrace) -> list[tuple[Any, ...]]:
        return [row for row in rows_of(raw) if row[5] != "optimizer_state"]

    assert without_numbers(repeated) == without_numbers(real)
    missing = len(real.log.events) - len(repeated.log.events)
    assert missing == 2 * 3  # a malloc and a free for each weight


def test_a_steady_step_frees_exactly_what_it_allocates() -> None:
    repeated, _ = both(*RECIPES["scaled foreach"])
    start = next(row.start for row in repeated.phases if row.step == 1)
    step = repeated.log.events[start:]
    mallocs = {event for event in step if event > 0}
    assert mallocs == {-event for event in step if event < 0}
    assert len(mallocs) == len(step) / 2


def test_the_first_step_stays_as_it_was() -> None:
    name, recipe, optimizer = RECIPES["foreach"]
    plain = raw_trace(name, recipe, target=ADA, optimizer=optimizer)
    events, ops = list(plain.log.events), list(plain.log.ops)
    phases = list(plain.phases)
    append_steady_step(plain)
    assert plain.log.events[: len(events)] == events
    assert plain.log.ops[: len(ops)] == ops
    assert plain.phases[: len(phases)] == phases


class Remembers(nn.Module):
    """Adds its last output to its input: 1 MiB for a batch of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is not None:
            x = x + self.state
        out = self.layer(x)
        self.state = out.detach()
        return out.sum()


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_what_a_forward_keeps_is_replaced_by_the_next(micro_steps: int) -> None:
    model, batch = Remembers(), torch.zeros(2, 256, 512)
    recipe = Recipe(
        batch_size=2, optimizer="sgd", gradient_accumulation_steps=micro_steps
    )
    workload = Workload(model=model, batch=batch, gpu=find_gpu("rtx-4090"))
    raw = trace_recipe(workload, recipe, blocks=(), target=ADA)
    phases = [row for row in raw.phases if row.name == "forward"]
    assert len(phases) == 2 * micro_steps
    moved = [
        [
            (event > 0) - (event < 0)
            for event in raw.log.events[phase.start : phase.end]
            if raw.log.sizes[abs(event) - 1] == 1 << 20
        ]
        for phase in phases
    ]
    # The batch and the output; then the batch, its sum with the last output, and the
    # output, which replaces the last.
    assert moved[0] == [1, 1]
    assert moved[-1] == [1, 1, 1, -1]
