"""What a recomputation makes is compared with what the forward has made."""

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from budgetfit.applying.checkpointing.recomputation_check import (
    MAX_SAMPLED_VALUES,
    _Samples,
    _sampling_slices,
)
from budgetfit.applying.checkpointing.recomputation_state import (
    RepeatableForwards,
    compares_values,
)
from budgetfit.errors import RecomputationError


@given(st.lists(st.integers(0, 5000), max_size=5))
def test_samples_are_small_and_never_empty(sizes: list[int]) -> None:
    assume(math.prod(sizes) < 2**60)  # torch counts bytes in 63 bits
    shape = torch.Size(sizes)
    few = torch.empty(shape, device="meta")[_sampling_slices(shape)]
    assert few.numel() <= MAX_SAMPLED_VALUES
    assert (few.numel() == 0) == (0 in sizes)
    assert few.numel() == shape.numel() or few.numel() > MAX_SAMPLED_VALUES / 2 ** len(
        sizes
    )


def difference(first: Tensor, second: Tensor) -> float:
    (found,) = _Samples([first]).differences(_Samples([second]))
    return found


def test_differences_are_relative_to_the_first() -> None:
    nan, inf = math.nan, math.inf
    assert difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == 0.1
    assert difference(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert difference(torch.tensor([0.0]), torch.tensor([1e-9])) == 1.0
    assert difference(torch.tensor([inf, nan]), torch.tensor([inf, nan])) == 0.0
    assert difference(torch.tensor([1.0, 1.0]), torch.tensor([1.0, nan])) == 1.0
    assert difference(torch.tensor([1j]), torch.tensor([1j])) == 0.0
    assert math.isinf(difference(torch.ones(1), torch.ones(2)))
    assert math.isinf(difference(torch.ones(1), torch.ones(1).double()))


def test_each_of_many_tensors_is_found_by_its_place() -> None:
    """Of all dtypes, aligned, in more than one buffer of host memory."""
    kinds = (torch.bool, torch.int64, torch.bfloat16, torch.complex128, torch.float32)
    first = [torch.ones(1 + 5 * at, dtype=kinds[at % 5]) for at in range(200)]
    first += [torch.ones(()), torch.ones(0), torch.ones(40, 50, 60).transpose(0, 2)]
    second = [each.clone() for each in first]
    changed = {3: 1.0, 17: 1.0, 200: 1.0}
    for at in changed:
        second[at].zero_()
    found = _Samples(first).differences(_Samples(second))
    assert found == [changed.get(at, 0.0) for at in range(len(first))]
    assert _Samples(first).differences(_Samples(first)) == [0.0] * len(first)


def counting() -> Callable[[], int]:
    """Return a counter in a cache of functools, which nothing puts back."""
    runs = functools.cache(lambda: itertools.count(1))
    return lambda: next(runs())


class Begins(nn.Module):
    """Draws from nowhere, from one of its forwards on."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # others may be so large that tanh hides the factor
        self.linear, self.begin = nn.Linear(4, 4), begin
        self.run = counting()

    def forward(self, x: Tensor) -> Tensor:
        run = self.run()
        return torch.tanh(self.linear(x) * (1 + (run > self.begin) * run))


def steps_until_refused(block: Begins, *, check: bool = True) -> int | None:
    repeats = RepeatableForwards(block, "block", check=check)
    for step in range(1, 10):
        x = torch.ones(2, 4, requires_grad=True)
        run: Callable[[Tensor], Tensor] = repeats.forward(block.forward)
        y = checkpoint(run, x, use_reentrant=False)
        try:
            y.sum().backward()
        except RecomputationError:
            return step
    return None


@pytest.mark.parametrize(
    ("begin", "found"), [(0, 1), (1, 1), (2, 2), (4, 3), (5, 3), (10, 8)]
)
def test_values_are_compared_in_the_first_forwards_and_some_later_ones(
    begin: int, found: int
) -> None:
    # Two runs a step, and what differs from the middle of a step on differs in it.
    assert steps_until_refused(Begins(begin)) == found
    assert steps_until_refused(Begins(begin), check=False) is None


@pytest.mark.parametrize("period", range(1, 17))
def test_each_of_up_to_16_forwards_in_turn_is_compared(period: int) -> None:
    for phase in range(period):
        assert any(map(compares_values, range(period + phase, 272, period)))
        # Also where the fault begins late: before there are five times as many.
        late = 1000 + phase
        assert any(map(compares_values, range(late, 5 * late, period)))


def test_few_of_many_forwards_are_compared() -> None:
    assert all(map(compares_values, range(1, 6)))
    for count in (2**k for k in range(21)):
        compared = sum(map(compares_values, range(1, count + 1)))
        assert compared <= 3.5 * count**0.5 + 1, count


count = counting()


class DirtyLSTM(nn.LSTM):
    """An LSTM that finds other values in free memory each time it runs."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        value = count()
        for size in {1024 * k for k in range(1, 65)}:
            held = [torch.full((size,), value, dtype=torch.uint8) for _ in range(4)]
            del held
        return super().forward(x)


class Masked(torch.autograd.Function):
    """Only the gradient depends on the mask, which is saved as bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.saved_tensors[0], None


def gradients_of(block: nn.Module, run: Callable[[Tensor], Any]) -> list[Tensor]:
    x = torch.linspace(-1, 1, 8 * 2 * 16).view(8, 2, 16).requires_grad_()
    loss = run(x)[0].square().sum()
    return list(torch.autograd.grad(loss, [x, *block.parameters()]))


def recompute(block: nn.Module, forward: Callable[[Tensor], Any]) -> None:
    """Run a checked block's forward twice."""
    repeats = RepeatableForwards(block, "block", check=True)
    gradients_of(
        block, lambda x: checkpoint(repeats.forward(forward), x, use_reentrant=False)
    )


@pytest.mark.parametrize("run_to_end", [False, True])
def test_bytes_of_a_workspace_that_nothing_writes_may_differ(run_to_end: bool) -> None:
    block = DirtyLSTM(16, 8, bidirectional=True)
    plain = gradients_of(block, block.forward)
    repeats = RepeatableForwards(block, "block", check=True, run_to_end=run_to_end)
    again = gradients_of(
        block,
        lambda x: checkpoint(
            repeats.forward(block.forward),
            x,
            use_reentrant=False,
            early_stop=not run_to_end,
        ),
    )
    assert all(map(torch.equal, again, plain))


def test_an_lstm_with_other_inputs_is_refused() -> None:
    block, runs = nn.LSTM(16, 8), itertools.count(1)

    def forward(x: Tensor) -> Any:
        return block(x * next(runs))

    with pytest.raises(RecomputationError, match=r"of the \d+ tensors that it saves"):
        recompute(block, forward)


def test_other_parameters_for_one_forward_are_refused_and_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(4, 4)
            self.repeats = RepeatableForwards(self.block, "block", check=True)

        def forward(self, x: Tensor) -> Tensor:
            # Its output depends on both, so that autograd saves a weight.
            run = self.repeats.forward(lambda x: self.block(self.block(x)))
            y: Tensor = checkpoint(run, x, use_reentrant=False)
            return y

    model = Model()
    others = {name: item.detach() + 1 for name, item in model.named_parameters()}
    x = torch.ones(2, 4, requires_grad=True)
    y = torch.func.functional_call(model, others, (x,))
    with pytest.raises(RecomputationError, match=r"torch\.func\.functional_call"):
        y.sum().backward()


def test_bytes_that_a_gradient_depends_on_may_not_differ() -> None:
    block, runs = nn.Identity(), itertools.count(1)

    def forward(x: Tensor) -> tuple[Tensor]:
        mask = torch.full(x.shape, next(runs), dtype=torch.uint8)
        return (Masked.apply(x, mask),)

    with pytest.raises(RecomputationError, match="1 of the 1 tensors that it saves"):
        recompute(block, forward)


class AttentionWithoutDropout(Masked):
    """Saves a dropout's seed that nothing has written, as attention on CUDA does."""


class Counted(Masked):
    """Saves a counter."""


@pytest.mark.parametrize(
    ("function", "refused"), [(AttentionWithoutDropout, False), (Counted, True)]
)
def test_the_seed_of_no_dropout_may_differ_and_a_counter_may_not(
    function: type[Masked], *, refused: bool
) -> None:
    block, runs = nn.Linear(16, 4), itertools.count(1)

    def forward(x: Tensor) -> tuple[Tensor]:
        seed = torch.tensor(next(runs))
        return (function.apply(block(x), seed),)

    expected = (
        pytest.raises(RecomputationError, match="tensors that it saves differ")
        if refused
        else nullcontext()
    )
    with expected:
        recompute(block, forward)


class Remembers(nn.Module):
    """Grows a list of tensors with a graph, of which it uses the number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(4, 4), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.memory.append(self.linear(x))
        return torch.tanh(self.memory[-1] * len(self.memory))


def test_an_attribute_that_cannot_be_kept_is_named_and_left_as_it_is() -> None:
    block = Remembers()
    block(torch.ones(2, 4))  # the graph of an earlier step, which nothing may hold
    repeats = RepeatableForwards(block, "block", check=True)
    run: Callable[[Tensor], Tensor] = repeats.forward(block.forward)
    y = checkpoint(run, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
    with pytest.raises(RecomputationError, match="its forward changes 'memory'"):
        y.sum().backward()
    assert len(block.memory) == 2
