"""Blocks that are given a container which changes are kept: they cannot run again."""

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetfit
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.profiling.block_chain import TrainingSettings
from budgetfit.planning.profiling.first_trace import with_checkpointable_blocks
from budgetfit.traces.session import TraceSession
from budgetfit.tracing.recording.changed_containers import has_container
from budgetfit.workload.workload import Workload

CHANGE = "change a container that they are given"
BLOCKS = 4
BATCH = {"x": torch.randn(4, 16, generator=torch.Generator().manual_seed(0))}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def change(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class UpdatesDict(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        state["x"] = self.change(state["x"])
        return state


class UpdatesObject(Block):
    def forward(self, state: SimpleNamespace) -> SimpleNamespace:
        state.x = self.change(state.x)
        return state


class Counts(Block):
    def forward(self, x: Tensor, extra: dict[str, int]) -> Tensor:
        extra["count"] += 1
        return self.change(x) * extra["count"]


class Appends(Block):
    """Reads all that was appended before, and appends to it."""

    def forward(self, features: list[Tensor]) -> None:
        features.append(self.change(torch.stack(features).mean(0)))


class Reads(Block):
    """Changes nothing itself."""

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.change(torch.stack(features).mean(0))


class Nested(Block):
    def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        state["cache"].memory = x = self.change(x + state["cache"].memory)
        return x


class Push(Block):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        x = self.change(x)
        skips.append(x)
        return x


class Pop(Block):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return self.change(x + skips.pop())


class Plain(Block):
    """Is given containers that nothing changes."""

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return self.change(x) * given["scale"][0]


class Net(nn.Module):
    def __init__(self, *kinds: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.head = nn.Linear(16, 1)


class WithDict(Net):
    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x}
        for block in self.blocks:
            state = block(state)
        return self.head(state["x"])


class WithObject(Net):
    def forward(self, x: Tensor) -> Tensor:
        state = SimpleNamespace(x=x)
        for block in self.blocks:
            state = block(state)
        return self.head(state.x)


class WithCount(Net):
    def forward(self, x: Tensor) -> Tensor:
        extra = {"count": 0}
        for block in self.blocks:
            x = block(x, extra=extra)
        return self.head(x)


class WithList(Net):
    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for block in self.blocks:
            block(features)
        return self.head(features[-1])


class AppendsItself(Net):
    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for block in self.blocks:
            features.append(block(features))
        return self.head(features[-1])


class WithNested(Net):
    def forward(self, x: Tensor) -> Tensor:
        state = {"cache": SimpleNamespace(memory=torch.zeros_like(x))}
        for block in self.blocks:
            x = block(x, state)
        return self.head(x)


class UNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.blocks:
            x = block(x, skips)
        return self.head(x)


class GivesOnly(Net):
    """Adds to the dict once the blocks have run, which is none of their concern."""

    def forward(self, x: Tensor) -> Tensor:
        given: dict[str, Any] = {"scale": [2, SimpleNamespace(other=x)]}
        for block in self.blocks:
            x = block(x, given)
        given["output"] = self.head(x)
        return given["output"]


CHANGING = {
    "a dict": lambda: WithDict(*[UpdatesDict] * BLOCKS),
    "an object": lambda: WithObject(*[UpdatesObject] * BLOCKS),
    "a counter": lambda: WithCount(*[Counts] * BLOCKS),
    "a list": lambda: WithList(*[Appends] * BLOCKS),
    "a list that the model appends to": lambda: AppendsItself(*[Reads] * BLOCKS),
    "an object in a dict": lambda: WithNested(*[Nested] * BLOCKS),
    "a stack": lambda: UNet(Push, Push, Pop, Pop),
}


def squares(output: Tensor, _: object) -> Tensor:
    return nn.functional.mse_loss(output, torch.ones_like(output))


def planned(model: nn.Module, **settings: object) -> budgetfit.Plan:
    settings = {"gpu": "rtx-4090", "batch_size": 4, "precision": "fp32"} | settings
    return budgetfit.plan(model, batch=BATCH, loss=squares, **settings)


@pytest.mark.parametrize("checkpointing", ["auto", "full", "none"])
@pytest.mark.parametrize("kind", CHANGING)
def test_blocks_are_kept_and_gradients_are_the_plain_loops(
    kind: str, checkpointing: str
) -> None:
    torch.manual_seed(0)
    model = CHANGING[kind]()
    other = copy.deepcopy(model)
    plan = planned(model, checkpointing=checkpointing)
    assert plan.model.blocks == plan.recipe.segments == ()
    (said,) = (line for line in plan.warnings if CHANGE in line)
    assert said.startswith(f"{BLOCKS} of {BLOCKS} blocks ")
    loss = squares(other(**BATCH), BATCH)
    loss.backward()
    expected = pytest.approx(loss.item(), rel=1e-6)
    run = budgetfit.apply(plan)
    gradients: dict[nn.Parameter, Tensor] = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: gradients.update({p: p.grad.clone()})
        )
    assert run.step(BATCH).item() == expected
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(gradients[parameter], same.grad)


@pytest.mark.parametrize("kind", ["a dict", "a stack"])
def test_such_plans_are_verified(kind: str) -> None:
    assert budgetfit.verify(planned(CHANGING[kind]()), device="cpu").passed


def test_a_step_that_is_long_enough_to_compare_times_is_planned() -> None:
    # With no block to recompute, freeing a byte takes infinitely long.
    plan = budgetfit.plan(
        CHANGING["a dict"](),
        gpu="rtx-4090",
        batch={"x": torch.zeros(8, 2**16, 16)},
        loss=squares,
        precision="fp32",
        effective_batch_size=8,
    )
    assert any(CHANGE in line for line in plan.warnings)


def test_only_blocks_of_a_container_that_changes_are_kept() -> None:
    class Mixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            extra = {"count": 0}
            given = {"scale": [1]}
            for block in self.blocks:
                x = block(x, extra if isinstance(block, Counts) else given)
            return self.head(x)

    model = Mixed(Plain, Counts, Plain, Counts)
    plan = planned(model, checkpointing="full")
    assert plan.model.blocks == ("blocks.0", "blocks.2")
    assert len(plan.recipe.segments) == 2
    budgetfit.apply(plan).step(BATCH)


@pytest.mark.parametrize("kind", CHANGING)
def test_they_are_found_at_one_batch_size_too(kind: str) -> None:
    workload = Workload(
        model=CHANGING[kind](), batch=BATCH, loss=squares, gpu=find_gpu("rtx-4090")
    ).with_found_blocks()
    assert workload.blocks
    traces = TraceSession(workload)
    settings = TrainingSettings(precision="fp32", optimizer="sgd")
    found = with_checkpointable_blocks(traces, settings, only_at=2).workload
    both = with_checkpointable_blocks(traces, settings).workload
    assert found.blocks == both.blocks != workload.blocks
    assert found.notes == both.notes


def test_containers_that_nothing_changes_are_recomputed_with() -> None:
    plan = planned(GivesOnly(*[Plain] * BLOCKS), checkpointing="full")
    assert len(plan.model.blocks) == BLOCKS
    assert not any(CHANGE in line for line in plan.warnings)
    budgetfit.apply(plan).step(BATCH)


def test_a_plan_from_cached_traces_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", str(tmp_path))
    first, second = (planned(CHANGING["a counter"]()) for _ in range(2))
    assert first.warnings == second.warnings
    assert second.model.blocks == ()


@dataclass(slots=True)
class Slotted:
    x: int = 0


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ({}, True),
        ((1, [torch.zeros(1)]), True),
        (SimpleNamespace(), True),
        (Slotted(), True),
        ((torch.zeros(1), None, "text", torch.float32, torch.Size([1])), False),
        (nn.Linear(1, 1), False),
    ],
)
def test_what_a_block_could_change(value: object, is_one: bool) -> None:
    assert has_container((value,), {}) == has_container((), {"x": value}) == is_one


def test_generation_caches_are_none_of_them() -> None:
    utils = pytest.importorskip("transformers.cache_utils")
    assert not has_container((), {"past_key_values": utils.DynamicCache()})
