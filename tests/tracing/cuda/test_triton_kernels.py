"""Triton kernels on fake tensors: what launches take, and what their code is told.

Triton runs on Linux alone and is not installed for the tests: classes of the same names
stand for its own. ``python -m tests.accuracy.loops '*liger*'`` compares real kernels.
"""

# ruff: noqa: ARG002 - signatures of Triton and of autograd

import queue
import sys
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import budgetfit
from budgetfit.tracing.cuda.triton.launches import TIMING_BUFFER_BYTES
from budgetfit.tracing.op_costs import op_cost
from tests.tracing.isolation.patches_page import patches_page

WIDTH, SAMPLES = 256, 1024
LAUNCHED: queue.SimpleQueue[Any] = queue.SimpleQueue()  # a list would be put back


class KernelInterface:
    """``kernel[grid](...)``, as triton.runtime.jit has it."""

    run: Callable[..., None]

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(
            *args, grid=grid, warmup=False, **kwargs
        )


class JITFunction(KernelInterface):
    """A kernel that says when it is launched."""

    def __init__(self, src: str = "tl.store(...)") -> None:
        self.src = src

    def run(self, *args: Any, grid: object, warmup: bool, **_: object) -> None:
        LAUNCHED.put(args)


class Autotuner(KernelInterface):
    """Times its kernel when it first sees a key, and keeps what it has chosen."""

    def __init__(self) -> None:
        self.fn, self.cache = JITFunction(), dict[Any, Any]()

    def do_bench(self, kernel_call: Callable[[], Any], quantiles: object) -> Any:
        raise AssertionError("nothing can be timed here")

    def run(self, *args: Any, **kwargs: Any) -> None:
        key = args[0].shape
        if key not in self.cache:
            self.cache[key] = self.do_bench(
                lambda: self.fn.run(*args, **kwargs), quantiles=(0.5,)
            )
        self.fn.run(*args, **kwargs)


class NullAllocator:
    """What Triton has as long as no allocator is set."""


KERNEL, PRODUCT, TUNED = JITFunction(), JITFunction("tl.dot(a, b)"), Autotuner()
ALLOCATOR: ContextVar[Any] = ContextVar("allocator")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these classes be Triton."""
    allocation = types.SimpleNamespace(
        _allocator=ALLOCATOR, NullAllocator=NullAllocator
    )
    ALLOCATOR.set(NullAllocator())
    parts: dict[str, Any] = {
        "jit": types.SimpleNamespace(
            JITFunction=JITFunction, KernelInterface=KernelInterface
        ),
        "autotuner": types.SimpleNamespace(Autotuner=Autotuner),
        "_allocation": allocation,
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"triton.runtime.{name}", part)


class Doubled(torch.autograd.Function):
    """Twice its input, by a kernel."""

    kernel: KernelInterface = KERNEL

    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        Doubled.kernel[(1,)](x, out, 2.0)
        return out

    @staticmethod
    def backward(_: object, *grads: torch.Tensor) -> torch.Tensor:
        out = torch.empty(grads[0].shape, device=grads[0].device)
        with torch.cuda.device(out.device):
            KERNEL[(1,)](grads[0], out, scale=2.0)
        return out


class Net(nn.Module):
    """Doubles between layers."""

    def __init__(self, doubled: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.doubled = doubled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.doubled(self.first(x)))


def estimate(
    doubled: Callable[[torch.Tensor], torch.Tensor], gpu: str = "rtx-4090"
) -> budgetfit.Estimate:
    return budgetfit.estimate(
        Net(doubled),
        budgetfit.Recipe(batch_size=SAMPLES, optimizer="sgd"),
        gpu=gpu,
        batch=torch.zeros(2, WIDTH),
        loss=lambda out, _: out.sum(),
    )


def test_a_launch_takes_no_memory_and_the_time_of_its_bytes() -> None:
    found, eager = estimate(Doubled.apply), estimate(lambda x: x * 2)
    assert found.allocated_bytes == eager.allocated_bytes
    assert found.reserved_bytes == eager.reserved_bytes
    assert found.step_ms == pytest.approx(eager.step_ms, rel=1e-3)
    assert LAUNCHED.empty()


def test_each_tensor_of_a_launch_is_passed_over_once() -> None:
    tensors = [torch.zeros(8, 8), torch.zeros(16, dtype=torch.bfloat16)]
    launch = torch.ops.budgetfit.triton_kernel.default
    cost = op_cost(launch, (tensors, False, False), {}, None)
    assert (cost.moved_bytes, cost.kernels) == (8 * 8 * 4 + 16 * 2, 1)


def test_kernels_are_sized_for_the_gpu_of_the_plan() -> None:
    def a_row_for_each(x: torch.Tensor) -> torch.Tensor:
        count = torch.cuda.get_device_properties(x.device).multi_processor_count
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (8, 9)
        rows = torch.zeros(count, 1 << 16, device=x.device)
        return Doubled.apply(x) + rows.sum()

    large, small = (estimate(a_row_for_each, gpu) for gpu in ("rtx-4090", "l4"))
    assert large.allocated_bytes - small.allocated_bytes == (128 - 58) * (4 << 16)


def test_torch_itself_asks_whether_a_device_is_its_context() -> None:
    index_of: Any = vars(torch.cuda)["_get_device_index"]

    def asking(x: torch.Tensor) -> torch.Tensor:
        assert index_of(torch.device("cuda", 1)) == 1
        return Doubled.apply(x)

    estimate(asking)


def test_other_code_and_other_threads_see_the_device_of_the_trace() -> None:
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()  # a list would be put back
    names: dict[str, Any] = {"torch": torch, "seen": seen}
    exec(
        "def look(x):\n    seen.put((x.device.type, torch.cuda.is_available()))", names
    )

    def looking(x: torch.Tensor) -> torch.Tensor:
        names["look"](x)
        here = threading.Thread(target=lambda: seen.put(x.device.type))
        here.start()
        here.join()
        KERNEL[(1,)](torch.zeros(0).untyped_storage())  # no fake: it is launched
        return Doubled.apply(x)

    available = torch.cuda.is_available()
    estimate(looking)
    found = {seen.get() for _ in range(seen.qsize())}
    assert found == {("cpu", available), "cpu"}
    assert not LAUNCHED.empty()
    while LAUNCHED.qsize():
        LAUNCHED.get()


def test_timing_a_kernel_takes_a_buffer_and_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = estimate(Doubled.apply).reserved_bytes
    monkeypatch.setattr(Doubled, "kernel", TUNED)
    before = dict(vars(TUNED))
    found = estimate(Doubled.apply).reserved_bytes
    assert found - plain == pytest.approx(TIMING_BUFFER_BYTES, rel=0.1)
    assert vars(TUNED) == before
    assert not TUNED.cache


@pytest.mark.parametrize("what", ["allocates", "multiplies"])
def test_what_is_not_known_of_a_kernel_is_said(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "allocates":
        ALLOCATOR.set(lambda *_: None)
    else:
        monkeypatch.setattr(Doubled, "kernel", PRODUCT)
    notes = " ".join(estimate(Doubled.apply).notes)
    assert ("set_allocator" in notes) == (what == "allocates")
    assert ("multiply matrices" in notes) == (what == "multiplies")


def test_everything_is_put_back() -> None:
    places = {
        "torch": torch,
        "torch.cuda": torch.cuda,
        "torch.cuda.device": torch.cuda.device,
        "torch._subclasses.fake_tensor.FakeTensor": FakeTensor,
        "triton.runtime.jit.JITFunction": JITFunction,
        "triton.runtime.autotuner.Autotuner": Autotuner,
    }
    before = {name: dict(vars(place)) for name, place in places.items()}
    changed: queue.SimpleQueue[str] = queue.SimpleQueue()  # a set would be put back

    def looking(x: torch.Tensor) -> torch.Tensor:
        for home, place in places.items():
            for name, value in vars(place).items():
                if value is not before[home].get(name):
                    changed.put(f"{home}.{name}")
        return Doubled.apply(x)

    estimate(looking)
    assert {name: dict(vars(place)) for name, place in places.items()} == before
    seen = {changed.get() for _ in range(changed.qsize())}
    listed = {
        name.strip() for patch in patches_page() for name in patch.name.split(",")
    }
    assert {name for name in seen if "cuda" in name or "triton" in name} <= listed
    assert "torch._subclasses.fake_tensor.FakeTensor.device" in seen & listed
