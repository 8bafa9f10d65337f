# ruff: noqa: NPY002 - the global generators are what is tested
"""Another thread computes and draws what it would without a plan."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import budgetfit
from budgetfit.tracing.isolation.private_generators import private_generators
from budgetfit.utils.rng_state import HostRngState
from tests.processes import python


class Net(nn.Module):
    """Linear layers and a softmax, for a batch of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.during: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.during()
        for layer in self.layers:
            x = functional.softmax(layer(x), -1)
        return x


def plan_net(net: nn.Module | None = None) -> budgetfit.Plan:
    return budgetfit.plan(
        net or Net(), vram="1GB", batch=torch.randn(2, 32), precision="bf16-mixed"
    )


@contextmanager
def in_another_thread(work: Callable[[], None]) -> Iterator[None]:
    """Run ``work`` over and over; what it raises is raised at the end."""
    done, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        while not done.is_set():
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failures:
        raise failures[0]


@pytest.fixture
def waiting_thread() -> Iterator[None]:
    """Another thread is alive: kernels that were registered once stay."""
    with in_another_thread(lambda: time.sleep(0.01)):
        plan_net()
        yield


@pytest.mark.usefixtures("waiting_thread")
def test_autocast_of_another_thread_has_the_policy_of_the_cpu() -> None:
    x = torch.randn(8, 8)
    seen: set[torch.dtype] = set()

    def work() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = functional.softmax(functional.linear(x, x), -1)
        seen.add(y.dtype)
        assert torch.is_autocast_enabled() is False

    with in_another_thread(work):
        plan_net()
    assert seen == {torch.bfloat16}  # CUDA's is fp32


def test_another_thread_draws_each_number_once() -> None:
    drawn: list[tuple[float, float, int]] = []

    def work() -> None:
        drawn.append((random.random(), float(np.random.rand()), random.getrandbits(64)))

    with in_another_thread(work):
        plan_net()
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == len(drawn) > 100


def test_what_a_trace_draws_is_not_taken_from_the_global_generators() -> None:
    """With another thread alive no state is put back: nothing may have been drawn."""
    before = random.getstate(), np.random.get_state()[1].tolist()
    with in_another_thread(lambda: None), private_generators():
        first = random.random(), np.random.rand(), random.randint(0, 9)
        random.seed(3)
        random.shuffle([1, 2, 3])
        np.random.normal(size=3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert first == (random.random(), np.random.rand(), random.randint(0, 9))


def test_a_trace_alone_puts_back_what_it_drew_by_other_names() -> None:
    if threading.active_count() > 1:
        pytest.skip("the test runner has threads")
    draw = random.random
    before = random.getstate()
    with private_generators():
        draw()
        torch.rand(3)
    assert random.getstate() == before


def test_a_name_that_was_imported_in_a_trace_draws_from_the_global_one_later() -> None:
    with private_generators():
        draw = random.random
    random.seed(5)
    first = draw()
    random.seed(5)
    assert first == random.random()


COMPUTED = """
import threading, torch
from torch import nn
from torch.nn import functional as F
from tests.tracing.isolation.test_other_threads import Net, plan_net

torch.manual_seed(0)
net, lstm = Net(), nn.LSTM(32, 8, batch_first=True)
x = torch.randn(4, 32, requires_grad=True)

def values():
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.dropout(net(x), 0.1)
        z = lstm(x[None])[0]
        a = F.scaled_dot_product_attention(y[None], y[None], y[None])
        n = F.rms_norm(F.cosine_similarity(y, y)[None], (4,))
    loss = sum(each.float().pow(2).sum() for each in (y, z, a, n))
    return [loss, *torch.autograd.grad(loss, [x, *net.parameters()])]

before = values()
threading.Thread(target=threading.Event().wait, daemon=True).start()
plan_net()
from budgetfit.tracing.cuda.dispatch import thread_kernels
assert set(thread_kernels._LIBRARIES) == {"AutocastCPU", "AutogradCPU"}
assert all(map(torch.equal, before, values()))
compiled = torch.compile(net, backend="aot_eager")
assert torch.equal(compiled(x), net(x))
"""


def test_ops_compute_the_same_while_kernels_stay_registered() -> None:
    result = python("-W", "ignore", "-c", COMPUTED)
    assert result.returncode == 0, result.stderr


def test_a_state_captured_in_a_trace_is_not_taken_for_the_global_one() -> None:
    np.random.seed(0)
    expected = str(np.random.get_state())
    with private_generators():
        np.random.rand(700)
        inside = HostRngState.now()
        np.random.rand(700)
        inside.restore()
        assert str(np.random.get_state()) == str(inside.numpy) != expected
    assert str(HostRngState.now().numpy) == expected
