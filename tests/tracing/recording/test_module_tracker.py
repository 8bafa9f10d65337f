"""Which layer and which block runs: forward, recomputed and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import BlockPass
from budgetfit.tracing.recording.module_tracker import first_tensor
from budgetfit.tracing.recording.raw_trace import RawTrace
from tests.models import EXAMPLES, MIB
from tests.traced import raw_trace, session, trace_module

SGD = Recipe(batch_size=4, optimizer="sgd")
MEBI = tuple(f"blocks.{index}" for index in range(3))


def trace(
    model: nn.Module, batch: torch.Tensor, blocks: tuple[str, ...], recipe: Recipe = SGD
) -> RawTrace:
    return trace_module(model, batch, recipe, blocks=blocks, target=None)


def passes(raw: RawTrace, direction: str, micro_step: int = 0) -> list[BlockPass]:
    return [
        row
        for row in raw.passes
        if row.direction == direction and row.micro_step == micro_step
    ]


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "transformer", "convolutions"])
def test_forward_passes_follow_each_other_and_backward_passes_come_back(
    name: str,
) -> None:
    raw = raw_trace(name, SGD, target=None)
    forward, backward = passes(raw, "forward"), passes(raw, "backward")
    count = len(session(name).workload.blocks)
    assert [row.block for row in forward] == list(range(count))
    assert [row.block for row in backward] == list(reversed(range(count)))
    for rows in (forward, backward):
        edges = [edge for row in rows for edge in (row.start, row.end)]
        assert edges == sorted(edges)
        assert all(row.start < row.end for row in rows)


def test_passes_lie_inside_their_phase_of_every_micro_step() -> None:
    recipe = Recipe(batch_size=2, optimizer="sgd", gradient_accumulation_steps=2)
    raw = raw_trace("gpt2", recipe, target=None, steps=2)
    for row in raw.passes:
        phase = next(
            p
            for p in raw.phases
            if (p.name, p.step, p.micro_step)
            == (row.direction, row.step, row.micro_step)
        )
        assert phase.start <= row.start < row.end <= phase.end
    assert len(raw.passes) == 2 * 2 * 2 * 3  # steps, micro-steps, directions, blocks


def test_a_block_hands_its_output_to_the_next_one() -> None:
    raw = raw_trace("mebi", SGD, target=None)
    forward = passes(raw, "forward")
    ends = [row.output_storage for row in forward[:-1]]
    assert [row.input_storage for row in forward[1:]] == ends
    assert raw.joined == [True, True]
    assert [raw.log.sizes[row.output_storage] for row in forward] == [4 * MIB] * 3


def test_two_stacks_are_not_joined_where_something_runs_between_them() -> None:
    assert raw_trace("t5", SGD, target=None).joined == [True, False, True]


class Reshaped(nn.Module):
    """What the second block gets is a view of what the first one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        return second(first(x).view(-1, 16))


def test_a_view_of_an_output_is_not_the_output() -> None:
    raw = trace(Reshaped(), torch.zeros(2, 3, 16), ("blocks.0", "blocks.1"))
    assert raw.joined == [False]
    first, second = passes(raw, "forward")
    assert first.output_storage == second.input_storage


def test_every_gradient_is_born_in_its_own_layers_backward() -> None:
    raw = raw_trace("gpt2", Recipe(batch_size=2, optimizer="sgd"), target=None)
    log, (start, end) = raw.log, _stretch(raw, "backward")
    modules = dict(EXAMPLES["gpt2"].model().named_modules())
    seen: dict[str, int] = {}
    for event in log.events[start:end]:
        if event > 0 and log.layers[event - 1] >= 0:
            layer = raw.layers[log.layers[event - 1]]
            seen[layer] = seen.get(layer, 0) + log.sizes[event - 1]
    for path, module in modules.items():
        own = sum(4 * p.numel() for p in module.parameters(recurse=False))
        assert seen.get(path, 0) >= own, path


def test_a_blocks_backward_holds_the_gradients_of_its_weights() -> None:
    raw = raw_trace("mebi", SGD, target=None)
    for row in passes(raw, "backward"):
        mallocs = [e - 1 for e in raw.log.events[row.start : row.end] if e > 0]
        weights = [k for k in mallocs if raw.log.sizes[k] == MIB]
        assert len(weights) == 1
        assert raw.layers[raw.log.layers[weights[0]]] == f"blocks.{row.block}.inner"


def test_a_recomputation_belongs_to_its_blocks_backward() -> None:
    recipe = Recipe(batch_size=4, optimizer="sgd", segments=(Segment(("blocks.1",)),))
    kept = passes(raw_trace("mebi", SGD, target=None), "backward")
    again = passes(raw_trace("mebi", recipe, target=None), "backward")
    lengths = [(row.block, row.end - row.start) for row in kept]
    assert [row.block for row in again] == [2, 1, 0]
    for row, (block, length) in zip(again, lengths, strict=True):
        assert row.block == block
        assert (row.end - row.start > length) == (block == 1)


def test_the_layers_of_a_recomputation_are_those_of_its_forward() -> None:
    recipe = Recipe(batch_size=4, optimizer="sgd", segments=(Segment(("blocks.1",)),))
    raw = raw_trace("mebi", recipe, target=None)
    row = next(p for p in passes(raw, "backward") if p.block == 1)
    mallocs = [e - 1 for e in raw.log.events[row.start : row.end] if e > 0]
    assert raw.layers[raw.log.layers[mallocs[0]]] == "blocks.1.inner"  # x W, again
    assert raw.layers[raw.log.layers[mallocs[1]]] == "blocks.1"  # its tanh


def test_a_frozen_block_in_front_has_a_forward_and_no_backward() -> None:
    model = EXAMPLES["mebi"].model()
    model.blocks[0].requires_grad_(requires_grad=False)
    raw = trace(model, EXAMPLES["mebi"].batch, MEBI)
    assert [row.block for row in passes(raw, "forward")] == [0, 1, 2]
    assert [row.block for row in passes(raw, "backward")] == [2, 1]


class OutOfOrder(nn.Module):
    """Runs its blocks against the order in which they were registered; skips one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.blocks[2](x))


def test_blocks_count_in_the_order_in_which_they_run() -> None:
    raw = trace(OutOfOrder(), torch.zeros(2, 16), MEBI)
    assert raw.blocks == [2, 0]
    assert [row.block for row in passes(raw, "forward")] == [2, 0]
    assert [row.block for row in passes(raw, "backward")] == [0, 2]


def test_what_runs_outside_every_module_has_no_layer() -> None:
    raw = raw_trace("mebi", SGD, target=None)
    start, _ = _stretch(raw, "backward")
    assert raw.log.layers[abs(raw.log.events[start]) - 1] == -1  # d loss / d loss


def _stretch(raw: RawTrace, name: str) -> tuple[int, int]:
    phase = next(row for row in raw.phases if row.name == name)
    return phase.start, phase.end


class WorkBetween(nn.Module):
    """The model itself does something between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        return second(torch.tanh(first(x)))


def test_what_lies_between_blocks_has_its_backward_between_theirs() -> None:
    raw = trace(WorkBetween(), torch.zeros(2, 16), ("blocks.0", "blocks.1"))
    second, first = passes(raw, "backward")
    assert second.end < first.start
    layers = {
        raw.layers[raw.log.layers[event - 1]]
        for event in raw.log.events[second.end : first.start]
        if event > 0
    }
    assert layers == {""}  # the gradient of tanh, in the model itself


Transformed = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Transforms(nn.Module):
    """Runs its blocks inside of a transform of ``torch.func``."""

    def __init__(self, transform: Transformed) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.transform = transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transform(self.blocks, x).pow(2).sum()


TRANSFORMS: dict[str, Transformed] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
    "per-sample": lambda f, x: torch.func.vmap(torch.func.jacrev(f))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's
@pytest.mark.parametrize("name", TRANSFORMS)
def test_inside_of_a_transform_no_block_runs_and_all_is_traced(name: str) -> None:
    model, batch = Transforms(TRANSFORMS[name]), torch.zeros(4, 16)
    raw = trace(model, batch, MEBI)
    assert raw.blocks == raw.passes == []
    assert raw.log.events == trace(model, batch, ()).log.events


def test_blocks_that_run_inside_of_a_transform_are_kept_by_a_plan() -> None:
    per_sample, batch = Transforms(TRANSFORMS["per-sample"]), torch.zeros(4, 16)
    found = budgetfit.plan(
        per_sample, gpu="t4", batch=batch, batch_size=4, loss=lambda y, _: y
    )
    assert found.recipe.segments == ()
    assert any("inside of torch.func" in warning for warning in found.warnings)


def test_a_mapped_model_takes_what_the_model_itself_takes() -> None:
    recipe, batch = Recipe(batch_size=64), torch.zeros(4, 16)
    mapped, plain = (
        budgetfit.estimate(
            Transforms(run), recipe, gpu="t4", batch=batch, loss=lambda y, _: y
        )
        for run in (TRANSFORMS["vmap"], lambda f, x: f(x))
    )
    assert mapped.allocated_bytes == plain.allocated_bytes


def test_the_first_tensor_is_found_however_deep_it_lies() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert first_tensor(x) is x
    assert first_tensor((None, 3, [y, x])) is y
    assert first_tensor({"scale": 2.0, "states": {"hidden": x}}) is x
    assert first_tensor((1.0, "text", None)) is None
