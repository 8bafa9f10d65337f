"""An offloaded block's graph: in-place writes, its life, where it may run."""

import gc
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from budgetfit.applying.checkpointing.activation_offload import run_with_offload
from budgetfit.core.step_trace import TO_HOST
from tests.applying.checkpointing.offloaded import (
    Ops,
    assert_same,
    gate,
    gradients,
    hidden,
    logged,
)

CHANGED = "modified by an in-place operation after it was saved"


# -- in-place operations ---------------------------------------------------------------


def test_a_write_to_a_saved_tensor_inside_the_block_is_refused_as_by_autograd() -> None:
    def overwrites(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z

    output = run_with_offload(overwrites, (hidden(3),), {})
    with pytest.raises(RuntimeError, match=CHANGED):
        output.sum().backward()


def test_a_write_after_the_block_comes_too_late_to_be_seen() -> None:
    x = hidden(3)
    output = run_with_offload(torch.exp, (x,), {})
    loss = output.sum()
    (expected,) = torch.autograd.grad(x.exp().sum(), x)
    with torch.no_grad():
        output.zero_()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)


def test_a_storage_that_was_written_to_between_two_saves_is_copied_again() -> None:
    def twice(x: torch.Tensor, unused: dict[str, Any]) -> torch.Tensor:
        y = x * 1
        unused["first"] = y.square()  # its saved tensor is stale, and never read
        y.add_(1)
        return y.square()

    x = hidden(4)
    with Ops() as ops:
        output = run_with_offload(twice, (x, {}), {})
    assert ops.counts[TO_HOST] == 2
    (found,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(found, 2 * (x + 1))


def test_a_write_to_what_stayed_is_refused() -> None:
    block, x, mask = gate()
    output = run_with_offload(block.forward, (x, mask), {})
    mask.zero_()
    with pytest.raises(RuntimeError, match=CHANGED):
        output.sum().backward()


def test_a_step_between_forward_and_backward_is_refused_under_autocast() -> None:
    block, x, mask = gate()
    with torch.autocast("cpu", torch.bfloat16):
        output = run_with_offload(block.forward, (x, mask), {})
    with torch.no_grad():
        block.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match=CHANGED):
        output.sum().backward()


# -- the graph owns the host's copies --------------------------------------------------


def test_a_dropped_graph_frees_its_host_memory() -> None:
    block, x, mask = gate()
    with Ops() as ops:
        output = run_with_offload(block.forward, (x, mask), {})
    assert ops.alive() == 3
    del output
    assert ops.alive() == 0


def test_backward_frees_host_memory_as_it_goes() -> None:
    # Each function saves one tensor; the gradient of its input comes when it has run.
    alive: list[int] = []

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(x)
            x.register_hook(lambda _: alive.append(ops.alive()))
        return x

    with Ops() as ops:
        output = run_with_offload(chain, (hidden(4),), {})
    output.sum().backward()
    assert alive == [3, 2, 1]
    assert ops.alive() == 0


def test_a_kept_graph_can_be_gone_through_again() -> None:
    block, x, mask = gate()
    output = run_with_offload(block.forward, (x, mask), {}).sum()
    weights = tuple(block.parameters())
    log, before = logged(block, x, mask, output)
    with log:
        first = torch.autograd.grad(output, weights, retain_graph=True)
        on_device = log.live_bytes - sum(gradient.nbytes for gradient in first)
        second = torch.autograd.grad(output, weights)
    assert on_device == before
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_second_derivatives_are_right() -> None:
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    x = hidden(5)
    output = run_with_offload(cube, (x,), {})
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), x)
    assert torch.allclose(curve, 6 * x)


def test_a_branch_that_no_loss_needs_leaves_nothing_behind() -> None:
    block, x, mask = gate()

    def two(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return block(x, mask), x.exp().sin()

    log, before = logged(block, mask, x)
    with log:
        wanted, other = run_with_offload(two, (x, mask), {}, module=block)
        loss = wanted.sum()
        loss.backward()
        del wanted, other, loss
        gc.collect()
    gradient_bytes = sum(p.nbytes for p in block.parameters()) + x.nbytes
    assert log.live_bytes == before + gradient_bytes


# -- where it runs ---------------------------------------------------------------------


def test_without_gradients_the_block_just_runs() -> None:
    block, x, mask = gate()
    with torch.no_grad(), Ops() as ops:
        output = run_with_offload(block.forward, (x, mask), {})
    assert ops.counts[TO_HOST] == 0
    assert torch.equal(output, block(x, mask))


def test_a_block_without_tensors_just_runs() -> None:
    assert run_with_offload(lambda: 3, (), {}) == 3


def test_outputs_may_be_tuples() -> None:
    x = hidden(3)
    one, name, (two,) = run_with_offload(lambda x: (x.exp(), "a", (x.sin(),)), (x,), {})
    assert name == "a"
    (found,) = torch.autograd.grad((one + two).sum(), x)
    assert torch.equal(found, x.exp() + x.cos())


def test_an_exception_in_the_block_leaves_nothing_switched_on() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        raise ValueError("inside")

    x = hidden(3)
    with Ops() as ops:
        with pytest.raises(ValueError, match="inside"):
            run_with_offload(fails, (x,), {})
        after = x.exp()
    gc.collect()
    assert ops.counts[TO_HOST] == 1
    assert ops.alive() == 0
    assert torch.autograd.grad(after.sum(), x)[0] is not None


def test_inside_a_checkpoint_gradients_are_right() -> None:
    block, x, mask = gate()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return run_with_offload(block.forward, (x.sin(), mask), {}).cos()

    checkpoint(outer, x, use_reentrant=False).sum().backward()
    found = gradients(block)
    block.zero_grad()
    block(x.sin(), mask).cos().sum().backward()
    assert_same(found, gradients(block))


def test_a_checkpoint_inside_keeps_its_own_tensors_to_itself() -> None:
    block, x, mask = gate()
    with Ops() as ops:
        output = run_with_offload(
            lambda x: checkpoint(block, x.sin(), mask, use_reentrant=False), (x,), {}
        )
    # What sin saves is x; the checkpoint saves its input and, unknown here, the mask.
    assert ops.counts[TO_HOST] == 3
    output.sum().backward()
    found = gradients(block)
    block.zero_grad()
    block(x.sin(), mask).sum().backward()
    assert_same(found, gradients(block))
