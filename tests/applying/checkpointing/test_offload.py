"""Offloaded blocks: the plain model's gradients, and what moves for them."""

import functools
import gc

import pytest
import torch
from torch.nn.functional import linear

from budgetfit.applying.checkpointing.activation_offload import run_with_offload
from budgetfit.core.step_trace import TO_DEVICE, TO_HOST
from budgetfit.tracing.recording.storage_log import StorageLog
from tests.applying.checkpointing.offloaded import (
    WIDTH,
    Ops,
    assert_same,
    gate,
    gradients,
    hidden,
    logged,
    loss_of,
    offload,
)
from tests.applying.small_models import CHAIN, MAKERS, batch_for, make

# -- the same gradients, and nothing runs twice ----------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_bit_equal_and_nothing_is_recomputed(
    name: str, precision: str
) -> None:
    def train(*, offloaded: bool) -> tuple[dict[str, torch.Tensor], int, Ops]:
        model = make(name)
        if offloaded:
            offload(model, CHAIN[name])
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = loss_of(model, batch_for(name))
        with Ops() as ops:
            loss.backward()
        return gradients(model), ops.products, ops

    plain, expected_products, _ = train(offloaded=False)
    found, found_products, ops = train(offloaded=True)
    assert_same(plain, found)
    assert found_products == expected_products
    assert ops.counts[TO_DEVICE] > 0


def test_every_second_block_may_be_offloaded() -> None:
    plain, mixed = make("gpt2"), make("gpt2")
    offload(mixed, CHAIN["gpt2"][::2])
    for model in (plain, mixed):
        torch.manual_seed(1)
        loss_of(model, batch_for("gpt2")).backward()
    assert_same(gradients(plain), gradients(mixed))


def test_parts_of_a_storage_that_count_writes_apart_are_copied_apart() -> None:
    # As a GRU on the CPU does: unsafe_chunk, then each part is written to and saved.
    def gates(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first, second = torch.unsafe_chunk(linear(x, weight), 2, dim=-1)
        return first.add_(1).sigmoid_() * second.add_(1).sigmoid_()

    def gradient(*, offloaded: bool) -> torch.Tensor:
        torch.manual_seed(0)
        x, weight = hidden(3, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
        output = (
            run_with_offload(gates, (x, weight), {}) if offloaded else gates(x, weight)
        )
        (found,) = torch.autograd.grad(output.sum(), weight)
        return found

    assert torch.equal(gradient(offloaded=True), gradient(offloaded=False))


# -- what moves and what stays ---------------------------------------------------------


def test_after_the_forward_only_the_output_is_left_on_the_device() -> None:
    # Saved: x 3*16, tanh and product 3*32 each, fp32. The mask is an argument: stays.
    block, _, mask = gate()
    log, before = logged(block, mask)
    with log:
        x = hidden(3, WIDTH)
        ops = Ops()
        with ops:
            output = run_with_offload(block.forward, (x, mask), {})
        leaf_bytes = 3 * WIDTH * 4  # what ``hidden`` multiplies is a leaf: it stays
        del x
        gc.collect()
        assert log.live_bytes == before + leaf_bytes + output.nbytes
        assert sorted(ops.moved_bytes) == [192, 384, 384]
        loss = output.sum()
        del output
        loss.backward()
        del loss
        gc.collect()
        gradient_bytes = sum(p.nbytes for p in block.parameters())
        assert log.live_bytes == before + gradient_bytes


def test_views_of_one_storage_are_copied_once_and_come_back_as_views() -> None:
    def attention(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        q, k, v = linear(x, weight).split(WIDTH, dim=-1)
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    x, weight = hidden(2, 5, WIDTH), torch.randn(3 * WIDTH, WIDTH, requires_grad=True)
    with Ops() as ops:
        output = run_with_offload(attention, (x, weight), {})
    # x, the fused projection, the probabilities.
    assert sorted(ops.moved_bytes) == [200, 640, 1920]
    with Ops() as back:
        (found,) = torch.autograd.grad(output.sum(), weight)
    assert back.counts[TO_DEVICE] == 3
    (expected,) = torch.autograd.grad(attention(x, weight).sum(), weight)
    assert torch.equal(found, expected)


def test_a_copy_is_on_the_device_until_its_last_view_was_read() -> None:
    # Backward reads the products in turn: four buffers come, one after the other goes.
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x)
        return x

    log = StorageLog()
    with log:
        x = hidden(1000)
        output = run_with_offload(chain, (x,), {})
        gradient = torch.ones_like(output)
        del output
        output = run_with_offload(chain, (x,), {})
        log.reset_peak()
        before = log.live_bytes
        output.backward(gradient)
        # Four buffers and the gradient that is made from the first of them.
        assert log.peak_bytes == before + 4 * 4000 + 4000


@pytest.mark.parametrize("as_keyword", [False, True])
def test_masks_buffers_and_parameters_stay(*, as_keyword: bool) -> None:
    block, x, mask = gate()
    block.register_buffer("scale", torch.full((2 * WIDTH,), 0.5))
    block.down.requires_grad_(False)  # a frozen weight is saved all the same

    def forward(x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        up = torch.tanh(block.up(x)) * mask[:, :] * block.scale
        return block.down(up)

    given = ((), {"x": x, "mask": mask}) if as_keyword else ((x,), {"mask": mask})
    with Ops() as ops:
        output = run_with_offload(forward, *given, module=block)
    moved = ops.counts[TO_HOST]
    assert moved == 2  # x and the tanh; products with a constant save nothing else
    output.sum().backward()
    assert block.up.weight.grad is not None


def test_a_forward_bound_to_a_module_keeps_that_modules_parameters_in_place() -> None:
    block, x, mask = gate()
    with Ops() as ops:
        run_with_offload(functools.partial(block.forward, mask=mask), (x,), {})
    assert sorted(ops.moved_bytes) == [192, 384, 384]


def test_the_program_is_the_same_at_every_batch_size() -> None:
    def copies(samples: int) -> int:
        model = make("gpt2")
        offload(model, CHAIN["gpt2"])
        with Ops() as ops:
            loss_of(model, batch_for("gpt2", samples))
        return ops.counts[TO_HOST]

    assert copies(2) == copies(3) == copies(64)


def test_single_numbers_stay() -> None:
    with Ops() as ops:
        x = hidden(8)
        output = run_with_offload(lambda x: x * x.sum().exp(), (x,), {})
    assert ops.moved_bytes == [32]
    (found,) = torch.autograd.grad(output.sum(), x)
    (expected,) = torch.autograd.grad((x * x.sum().exp()).sum(), x)
    assert torch.equal(found, expected)


def test_tensors_of_another_device_stay() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        torch.ones(3, device="meta", requires_grad=True).exp()
        return x.exp()

    with Ops() as ops:
        run_with_offload(forward, (hidden(8),), {})
    assert ops.moved_bytes == [32]


def test_complex_tensors_that_are_conjugated_lazily_are_right() -> None:
    def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table.conj()
        turned = turned.conj() * turned * turned.conj().imag.cos()
        return torch.view_as_real(turned).flatten(-2) * turned.conj().imag.repeat(1, 2)

    x, table = hidden(3, 8), torch.randn(4, dtype=torch.complex64)
    (expected,) = torch.autograd.grad(rotate(x, table).sum(), x)
    (found,) = torch.autograd.grad(run_with_offload(rotate, (x, table), {}).sum(), x)
    assert torch.equal(found, expected)


def test_a_storage_read_in_another_dtype_is_copied_once() -> None:
    def bits(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return y * y.detach().view(torch.int32).remainder(3)

    x = hidden(8)
    with Ops() as ops:
        output = run_with_offload(bits, (x,), {})
    assert len(ops.moved_bytes) == 2  # exp's output, the remainder
    (found,) = torch.autograd.grad(output.sum(), x)
    (expected,) = torch.autograd.grad(bits(x).sum(), x)
    assert torch.equal(found, expected)


def test_autocasts_copies_of_parameters_are_made_anew_and_not_moved() -> None:
    block, x, mask = gate()
    ops = Ops()
    with torch.autocast("cpu", torch.bfloat16), ops:
        output = run_with_offload(block.forward, (x, mask), {})
    weights = 2 * 2 * WIDTH * WIDTH * 2
    assert sum(ops.moved_bytes) < weights
    with Ops() as backward:
        output.sum().backward()
    found = gradients(block)
    block.zero_grad()
    assert backward.counts["aten._to_copy.default"] >= 1
    with torch.autocast("cpu", torch.bfloat16):
        block(x, mask).sum().backward()
    assert_same(found, gradients(block))
