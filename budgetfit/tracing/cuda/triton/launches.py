"""Launches of Triton kernels on fake tensors: an op that allocates nothing.

A kernel gets pointers. What it writes to was allocated by whoever launches it; it can
ask for memory itself only through an allocator that a program sets
(``triton.set_allocator``), and how much is known only once it is compiled. A kernel
with several configurations is timed when it first runs, which takes memory for once.

Sources (triton 3.7.1): ``runtime/jit.py``, ``runtime/autotuner.py``,
``runtime/_allocation.py``, ``testing.py`` (``do_bench``).
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from budgetfit.tracing.call_cache import Args, Kwargs
from budgetfit.tracing.cuda.kernel_memory.registry import (
    Call,
    Steps,
    Unverified,
    kernel_memory,
)
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.cuda.triton.device_answers import answers_for_kernels

# Kept alive: deleting it would unregister the op. All its tensors may be written to.
_LIBRARY = torch.library.Library("budgetfit", "FRAGMENT")
_LIBRARY.define(
    "triton_kernel(Tensor(a!)[] tensors, bool multiplies, bool allocates) -> ()"
)
torch.library.register_fake("budgetfit::triton_kernel", lambda *_: None, lib=_LIBRARY)

# ``get_empty_cache_for_benchmark`` in triton/backends/nvidia/driver.py.
TIMING_BUFFER_BYTES: Final = 256 << 20

_SCRATCH = Unverified(
    "triton.set_allocator was called: what Triton kernels ask of that allocator is not "
    "in the prediction"
)
_MULTIPLIES = Unverified(
    "Triton kernels that multiply matrices are timed by the bytes of their tensors: "
    "they may take longer"
)


@kernel_memory("budgetfit.triton_kernel.default")
def _triton_kernel(call: Call) -> Steps:
    _, multiplies, allocates = call.args
    if multiplies:
        yield _MULTIPLIES
    if allocates:
        yield _SCRATCH


@contextlib.contextmanager
def launches_on_fakes() -> Iterator[None]:
    """Record launches with fake tensors instead of running them."""
    jit: Any = sys.modules["triton.runtime.jit"]
    autotuner: Any = sys.modules["triton.runtime.autotuner"]
    timed: dict[int, dict[Any, Any]] = {}

    def run(
        kernel: object, *args: object, warmup: bool = False, **kwargs: object
    ) -> Any:
        if not _has_fakes(args, kwargs):
            return run_kernel(kernel, *args, warmup=warmup, **kwargs)
        if not warmup:  # else it is compiled only
            launch(kernel, *args, **kwargs)
        return None

    def tune(tuner: object, *args: object, **kwargs: object) -> object:
        if not _has_fakes(args, kwargs):
            return run_tuner(tuner, *args, **kwargs)
        with _tuned_anew(tuner, timed.setdefault(id(tuner), {})):
            return run_tuner(tuner, *args, **kwargs)

    run_kernel: Callable[..., Any] = jit.JITFunction.run
    run_tuner: Callable[..., Any] = autotuner.Autotuner.run
    with (
        mock.patch.object(jit.JITFunction, "run", run),
        mock.patch.object(autotuner.Autotuner, "run", tune),
    ):
        yield


def launch(kernel: object, *args: object, **kwargs: object) -> None:
    """Record a launch: an op over the tensors among its arguments."""
    with torch.no_grad():
        torch.ops.budgetfit.triton_kernel.default(
            list(_tensors([*args, *kwargs.values()])),
            "tl.dot" in getattr(kernel, "src", ""),
            kernels_may_allocate(),
        )


def _tensors(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        # A TensorDescriptor has its tensor in ``base``.
        found = value
        if not isinstance(value, torch.Tensor):
            found = getattr(value, "base", None)
        if isinstance(found, torch.Tensor):
            yield found


def _has_fakes(args: Args, kwargs: Kwargs) -> bool:
    values = [*args, *kwargs.values()]
    return any(isinstance(tensor, FakeTensor) for tensor in _tensors(values))


def kernels_may_allocate() -> bool:
    """Whether an allocator is set; without one, kernels that need memory fail."""
    allocation: Any = sys.modules.get("triton.runtime._allocation")
    if allocation is None:
        return False
    return not isinstance(allocation._allocator.get(), allocation.NullAllocator)


@contextlib.contextmanager
def _tuned_anew(tuner: Any, timed: dict[Any, Any]) -> Iterator[None]:
    """Let a kernel be timed as in a new process, with the memory that this takes.

    ``timed``: which configuration was taken for which arguments, in this trace.
    """
    before = dict(vars(tuner))
    tuner.cache, tuner.do_bench, tuner.cache_results = timed, _time, False
    try:
        yield
    finally:
        vars(tuner).clear()
        vars(tuner).update(before)


def _time(kernel_call: Callable[[], object], quantiles: object = None) -> list[float]:  # noqa: ARG001 - triton's signature
    """Do once what triton repeats: it overwrites a buffer, then runs the kernel."""
    buffer = torch.empty(TIMING_BUFFER_BYTES, dtype=torch.int8)
    kernel_call()
    del buffer
    return [1.0, 1.0, 1.0]


def triton_is_loaded() -> bool:
    """Whether a module of this process may have Triton kernels."""
    return "triton.runtime.autotuner" in sys.modules


@contextlib.contextmanager
def kernels_on_fakes(target: CudaTarget | None) -> Iterator[None]:
    """Let kernels be launched on fake tensors, and their code see the target's GPU.

    Does nothing where Triton is not loaded, or without a target.
    """
    if target is None or not triton_is_loaded():
        yield
        return
    with answers_for_kernels(target), launches_on_fakes():
        yield
