"""What code with Triton kernels is told about the device: the GPU of the plan.

In a trace fake CPU tensors stand for CUDA tensors. Libraries of kernels ask for the
device to choose what they allocate (Liger's RMSNorm: a row for each multiprocessor),
and launch nothing on a CPU. Other code is not told: it would leave the CPU's part of
PyTorch, in which the trace runs.
"""

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from budgetfit.tracing.cuda.target import CudaTarget

# Packages of kernels, whose modules without kernels ask as well. Other modules are
# known by the kernels among their names.
_LIBRARIES: Final = ("liger_kernel", "trl.kernels")
_CUDA: Final = torch.device("cuda", 0)


@contextlib.contextmanager
def answers_for_kernels(target: CudaTarget) -> Iterator[None]:
    """Answer for a GPU in this thread, in the context, to code with Triton kernels."""
    thread = threading.get_ident()
    known: dict[str, bool] = {}

    def is_asked_by_kernels() -> bool:
        """Whether the code that called the patched function has kernels."""
        if threading.get_ident() != thread:
            return False
        names = sys._getframe(2).f_globals
        module = names.get("__name__", "")
        if module not in known:
            known[module] = _has_kernels(module, names)
        return known[module]

    def answering(answer: Callable[..., Any], original: Any) -> Callable[..., object]:
        @functools.wraps(original)
        def function(*args: object, **kwargs: object) -> Any:
            answers = answer if is_asked_by_kernels() else original
            return answers(*args, **kwargs)

        return function

    def of_fakes(name: str, answer: object) -> property:
        original: Any = getattr(FakeTensor, name)
        return property(
            lambda fake: answer if is_asked_by_kernels() else original.__get__(fake),
            getattr(original, "fset", None),
        )

    with contextlib.ExitStack() as stack:
        for owner, name, answer in _answers(target):
            stack.enter_context(
                mock.patch.object(owner, name, answering(answer, getattr(owner, name)))
            )
        for name, value in (("device", _CUDA), ("is_cuda", True)):
            stack.enter_context(
                mock.patch.object(FakeTensor, name, of_fakes(name, value))
            )
        yield


def _has_kernels(module: str, names: dict[str, Any]) -> bool:
    if any(module == each or module.startswith(f"{each}.") for each in _LIBRARIES):
        return True
    jit: Any = sys.modules.get("triton.runtime.jit")
    return jit is not None and any(
        isinstance(value, jit.KernelInterface) for value in list(names.values())
    )


def _answers(
    target: CudaTarget,
) -> tuple[tuple[object, str, Callable[..., object]], ...]:
    """Return functions of PyTorch, and what they return for the GPU of the plan."""
    major, minor = target.compute_capability
    properties = types.SimpleNamespace(
        multi_processor_count=target.sm_count, major=major, minor=minor
    )
    cuda = torch.cuda
    return (
        (cuda, "is_available", lambda: True),
        (cuda, "current_device", lambda: 0),
        (cuda, "get_device_capability", lambda *_, **__: (major, minor)),
        (cuda, "get_device_properties", lambda *_, **__: properties),
        # Not the class, by which torch's own functions ask ``isinstance``.
        *(
            (cuda.device, name, lambda *_: None)
            for name in ("__init__", "__enter__", "__exit__")
        ),
    )
