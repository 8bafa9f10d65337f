"""A checkpoint's input in host memory."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from budgetfit.applying.checkpointing.activation_offload import offload_checkpoint_input
from budgetfit.applying.checkpointing.segment_checkpoint import SegmentCheckpoint
from budgetfit.applying.pytree import tensors_in
from budgetfit.core.step_trace import TO_DEVICE, TO_HOST
from tests.applying.checkpointing.offloaded import (
    WIDTH,
    Gate,
    Ops,
    assert_same,
    gate,
    gradients,
    hidden,
    logged,
    loss_of,
)
from tests.applying.small_models import CHAIN, batch_for, make

# -- a checkpoint's input --------------------------------------------------------------


def test_a_checkpoints_input_waits_on_the_host_and_its_mask_does_not() -> None:
    block, _, mask = gate()
    log, before = logged(block, mask)
    with log:
        x = hidden(3, WIDTH)
        with Ops() as ops, offload_checkpoint_input(x):
            output = checkpoint(block, x, mask, use_reentrant=False)
        leaf_bytes = x.nbytes
        del x
        gc.collect()
        assert log.live_bytes == before + leaf_bytes + output.nbytes
    assert ops.moved_bytes == [3 * WIDTH * 4]
    with Ops() as backward:
        output.sum().backward()
    assert backward.counts[TO_DEVICE] == 1
    found = gradients(block)
    block.zero_grad()
    block(hidden(3, WIDTH), mask).sum().backward()
    assert_same(found, gradients(block))


def test_a_regions_input_waits_on_the_host() -> None:
    first, x, mask = gate()
    second = Gate()
    region = SegmentCheckpoint()
    with Ops() as ops:
        with offload_checkpoint_input(x):
            middle = region.call(0, first.forward, (x, mask), {}, random=False)
        output = region.call(1, second.forward, (middle, mask), {}, random=False)
    assert ops.moved_bytes == [3 * WIDTH * 4]
    output.sum().backward()
    found = gradients(first)
    first.zero_grad()
    second(first(x, mask), mask).sum().backward()
    assert_same(found, gradients(first))


def test_inputs_of_a_whole_model_wait_on_the_host() -> None:
    def recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with offload_checkpoint_input(next(tensors_in((args, kwargs)))):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    plain, moved = make("gpt2"), make("gpt2")
    for name in CHAIN["gpt2"]:
        block = moved.get_submodule(name)
        block.forward = functools.partial(recomputed, block.forward)
    for model in (plain, moved):
        torch.manual_seed(1)
        with Ops() as ops:
            loss_of(model, batch_for("gpt2")).backward()
    assert ops.counts[TO_HOST] == ops.counts[TO_DEVICE] == len(CHAIN["gpt2"])
    assert_same(gradients(plain), gradients(moved))
