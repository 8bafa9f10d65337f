"""Copies that happen as late as they may: who waits too little gets rubbish.

A stand-in for the copying stream. On a card a copy may be done at any time between
being asked for and being waited for; here each is done at the last moment, and it is
noted when the memory that it reads or writes was given back before.
"""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from budgetfit.applying.checkpointing import activation_offload as offload_module
from budgetfit.applying.checkpointing.activation_offload import (
    offload_checkpoint_input,
    run_with_offload,
)
from tests.applying.checkpointing.offloaded import (
    assert_same,
    gate,
    gradients,
    hidden,
    loss_of,
    offload,
)
from tests.applying.small_models import CHAIN, batch_for, make

RUBBISH = 1


class Late(NamedTuple):
    """What to wait for: the first ``count`` copies."""

    stream: "LateStream"
    count: int

    def wait(self) -> None:
        self.stream.run(self.count)


class LateStream:
    """Makes each copy when it is waited for."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._waiting: list[Callable[[], None]] = []
        self._done = 0

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(x, RUBBISH)
        source = weakref.ref(x.untyped_storage())
        self._waiting.append(partial(self._copy_to_host, host, source))
        return host

    def to_device(self, host: torch.Tensor, _: torch.device) -> torch.Tensor:
        buffer = torch.full_like(host, RUBBISH)
        target = weakref.ref(buffer.untyped_storage())
        self._waiting.append(partial(self._copy_to_device, host, target))
        return buffer

    def record_copies(self, _: torch.device) -> Late:
        return Late(self, self._done + len(self._waiting))

    def wait_for_copies(self, device: torch.device) -> None:
        self.record_copies(device).wait()

    def run(self, count: int) -> None:
        while self._done < count:
            self._waiting.pop(0)()
            self._done += 1

    def finish(self) -> None:
        """Make the copies that nobody waited for."""
        gc.collect()
        self.run(self._done + len(self._waiting))

    def _copy_to_host(
        self, host: torch.Tensor, source: weakref.ref[torch.UntypedStorage]
    ) -> None:
        storage = source()
        if storage is None:
            self.faults.append("freed before it was copied to the host")
            return
        with torch.no_grad():
            host.copy_(torch.empty(0, dtype=host.dtype).set_(storage, 0, host.shape))

    def _copy_to_device(
        self, host: torch.Tensor, target: weakref.ref[torch.UntypedStorage]
    ) -> None:
        storage = target()
        if storage is None:
            self.faults.append("freed before the copy into it was made")
            return
        with torch.no_grad():
            torch.empty(0, dtype=host.dtype).set_(storage, 0, host.shape).copy_(host)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    late = LateStream()
    for name in ("to_host", "to_device", "record_copies", "wait_for_copies"):
        monkeypatch.setattr(offload_module, name, getattr(late, name))
    return late


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_late_copies_change_no_gradient(name: str, stream: LateStream) -> None:
    plain, moved = make(name), make(name)
    offload(moved, CHAIN[name])
    for model in (plain, moved):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch_for(name))
        loss.backward()
        del loss
    stream.finish()
    assert stream.faults == []
    assert_same(gradients(plain), gradients(moved))


def test_a_checkpoints_late_input_changes_no_gradient(stream: LateStream) -> None:
    block, x, mask = gate()
    with offload_checkpoint_input(x):
        output = checkpoint(block, x, mask, use_reentrant=False)
    output.sum().backward()
    found = gradients(block)
    block.zero_grad()
    block(x, mask).sum().backward()
    stream.finish()
    assert stream.faults == []
    assert_same(found, gradients(block))


def test_what_backward_did_not_read_is_waited_for_before_its_memory_goes(
    stream: LateStream,
) -> None:
    x = hidden(8)
    # What was saved last is asked for first, so the rest is on its way when it is read.
    other, wanted = run_with_offload(lambda x: (x.sin().cos(), x.exp()), (x,), {})
    wanted.sum().backward()
    del wanted, other
    stream.finish()
    assert stream.faults == []


def test_memory_is_not_let_go_before_its_copy_when_a_block_fails(
    stream: LateStream,
) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        (x * 2).sin()
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        run_with_offload(fails, (hidden(8),), {})
    stream.finish()
    assert stream.faults == []
