"""A recomputed block finds its buffers as its forward did, and moves them on once."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from budgetfit.applying.checkpointing.apply_segments import apply_segments
from budgetfit.applying.checkpointing.mutated_buffers import (
    MAX_ELEMENTS,
    BufferSnapshot,
    MutatedBuffers,
)
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from tests.models import Chain, mean

NAMES = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


class Centred(nn.Module):
    """Subtracts an average that its own forward has moved on, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(6, 6), in_place
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        mean = y.detach().mean(0)
        if self.in_place:
            self.average.lerp_(mean, 0.5)
        else:
            self.average = torch.lerp(self.average, mean, 0.5)
        return torch.tanh((y - self.average) * (1 + self.average))


def spectral() -> nn.Module:
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    return nn.Sequential(linear, nn.Tanh())


def _add_norm(block: nn.Sequential) -> None:
    block.append(nn.BatchNorm1d(6))


def _add_spectral_norm(block: nn.Sequential) -> None:
    nn.utils.parametrizations.spectral_norm(block[0])


def _add_counting_module(block: nn.Sequential) -> None:
    block.append(Counting("small"))


def _add_hook(block: nn.Sequential) -> None:
    total = torch.zeros(6)
    block[0].register_forward_hook(
        lambda _m, _a, output: output + 0.1 * total.add_(output.detach().mean(0))
    )


CHANGES = (_add_norm, _add_spectral_norm, _add_counting_module, _add_hook)


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_what_is_added_to_a_block_while_training_runs_once(
    change: Callable[[nn.Sequential], None],
) -> None:
    """After the sixth forward, in which values are not compared."""

    def trained(segments: tuple[Segment, ...]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Module()
        model.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)
        )
        model.forward = nn.Sequential(*model.blocks).forward
        undo = apply_segments(model, segments)
        for step in range(9):
            if step == 6:
                for block in model.blocks:
                    change(block)
            model(torch.randn(5, 6)).square().mean().backward()
        undo()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        return [*gradients, *model.buffers()]

    expected = trained(())
    for segments in (
        tuple(Segment((name,)) for name in NAMES),
        (Segment(NAMES[:2]), Segment(NAMES[2:], nested=True)),
    ):
        found = trained(segments)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


class Counting(nn.Module):
    """Notes something that its output does not depend on, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way, self.forwards = nn.Linear(6, 6), way, 0
        size = MAX_ELEMENTS + 1 if way == "large" else 6
        state = None if way == "filled" else torch.zeros(size)
        if way == "frozen parameter":
            self.state = nn.Parameter(torch.zeros(size), requires_grad=False)
        else:
            self.register_buffer("state", state)

    @torch.no_grad()
    def note(self, mean: Tensor) -> None:
        self.forwards += 1
        if self.way == "filled" and self.state is None:
            self.state = mean
        elif self.way == "data":
            self.state.data.lerp_(mean, 0.5)
        elif self.way != "late" or self.forwards > 5:
            self.state[:6] += mean

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.note(y.detach().mean(0))
        return x + y


def normed(x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    return nn.functional.batch_norm(
        x, norm.running_mean, norm.running_var, training=True
    )


class ByFunction(nn.Module):
    """Calls ``functional.batch_norm`` with the statistics of a norm, or a helper."""

    def __init__(self, *, by_helper: bool = False, evaluates: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.norm.train(not evaluates)
        self.by_helper = by_helper

    def forward(self, x: Tensor) -> Tensor:
        y, norm = self.linear(x), self.norm
        if self.by_helper:
            return x + normed(y, norm)
        y = nn.functional.batch_norm(
            y, norm.running_mean, norm.running_var, training=True
        )
        return x + y


def fused() -> nn.Module:
    """Scales its weights by statistics that its forward moves on afterwards."""
    config = torch.ao.quantization.get_default_qat_qconfig("x86")
    layer = torch.ao.nn.intrinsic.qat.ConvBnReLU1d(6, 6, 1, qconfig=config)
    return nn.Sequential(nn.Unflatten(1, (6, 1)), layer, nn.Flatten())


KINDS = {
    "norm by function": ByFunction,
    "norm by helper": lambda: ByFunction(by_helper=True),
    "norm in evaluation mode": lambda: ByFunction(evaluates=True),
    "fused convolution": fused,
    "through data": lambda: Counting("data"),
    "large": lambda: Counting("large"),
    "frozen parameter": lambda: Counting("frozen parameter"),
    "filled": lambda: Counting("filled"),
    "in place": lambda: Centred(in_place=True),
    "replaced": lambda: Centred(in_place=False),
    "spectral norm": spectral,
    "instance norm": lambda: nn.Sequential(
        nn.Linear(6, 6),
        nn.Unflatten(1, (2, 3)),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.Flatten(),
        nn.Tanh(),
    ),
    "norm of several cards": lambda: nn.Sequential(
        nn.Linear(6, 6), nn.SyncBatchNorm(6)
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()),
}
SEGMENTS = {
    "each": tuple(Segment((name,)) for name in NAMES),
    "pairs": (Segment(NAMES[:2]), Segment(NAMES[2:])),
    "nested": (Segment(NAMES, nested=True),),
}


def trained(
    model: nn.Module, segments: tuple[Segment, ...], steps: int = 3
) -> nn.Module:
    recipe = Recipe(batch_size=4, precision="fp32", optimizer="sgd", segments=segments)
    with Run(model, recipe, loss=mean) as run:
        for seed in range(steps):
            torch.manual_seed(seed)
            run.step(torch.randn(4, 6))
    return model


def copied(held: list[BufferSnapshot]) -> list[str]:
    """Return the names of what was copied."""
    return [each.name for each in held if each.copy is not None]


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_buffers_are_those_of_plain_training(
    kind: str, segments: str
) -> None:
    model = Chain(*(KINDS[kind]() for _ in NAMES))
    # Values are compared in forwards 1 to 5, where more is copied.
    plain = trained(copy.deepcopy(model), (), steps=7).state_dict()
    planned = trained(model, SEGMENTS[segments], steps=7).state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(planned[name], value, rtol=1e-6, atol=1e-7)


def test_what_is_first_written_to_in_a_later_forward_moves_on_once() -> None:
    model = nn.Sequential(Counting("late"), Counting("late"))
    plain = trained(copy.deepcopy(model), (), steps=9).state_dict()
    segments = (Segment(("0",)), Segment(("1",)))
    with pytest.warns(UserWarning, match=r"Counting.state was written to for the fir"):
        planned = trained(model, segments, steps=9).state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(planned[name], value, rtol=1e-6, atol=1e-7)


def test_a_buffer_that_nobody_writes_to_is_copied_once_and_when_all_are() -> None:
    block = nn.Linear(2, 2)
    block.register_buffer("table", torch.zeros(2))
    buffers = MutatedBuffers([block])
    assert buffers.find_mutated(buffers.snapshot()) == []
    assert copied(buffers.snapshot()) == []
    assert copied(buffers.snapshot(every=True)) == ["table"]


def test_a_buffer_that_was_written_to_once_is_always_held() -> None:
    block = Centred(in_place=True)
    buffers = MutatedBuffers([block])
    first = buffers.snapshot()
    block.average += 1
    assert [each.name for each in buffers.find_mutated(first)] == ["average"]
    for _ in range(2):  # forwards that leave it alone
        held = buffers.snapshot()
        assert copied(held) == ["average"]
        assert buffers.find_mutated(held) == []


def test_large_tables_are_never_copied() -> None:
    block = nn.Linear(2, 2)
    block.register_buffer("mask", torch.zeros(MAX_ELEMENTS + 1, dtype=torch.bool))
    assert copied(MutatedBuffers([block]).snapshot()) == []


class Experts(nn.Module):
    """Holds its experts' weights itself, as fused mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eio->bo", x, self.weight)


def test_weights_that_peft_parametrizes_in_each_forward_are_not_copied() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_parameters=["0.weight"], target_modules=[])
    model = peft.get_peft_model(nn.Sequential(Experts()), config)
    buffers = MutatedBuffers(model.modules())
    held = buffers.snapshot()
    model(torch.ones(3, 4)).sum().backward()
    assert buffers.find_mutated(held) == []
