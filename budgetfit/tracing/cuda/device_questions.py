"""Note where a user's code asks whether a tensor is on CUDA.

Fakes on the CPU stand for CUDA tensors, so a trace takes the branch for the CPU. The
other cannot run in its place: it may launch kernels of its own, or ask for a device.
"""

import contextlib
import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensor

from budgetfit.utils.user_code import is_library

_COMPARISONS: Final = frozenset({"COMPARE_OP", "CONTAINS_OP"})
_ANSWERS: Final = "budgetfit.tracing.cuda.triton.device_answers"
_NEAR: Final = 7  # instructions from a constant to what compares it, a call included


@contextlib.contextmanager
def device_questions_noted(notes: set[str]) -> Iterator[None]:
    """Add a note to ``notes`` for each of the user's functions that asks."""

    def noting(name: str, asks: Any) -> property:
        original: Any = getattr(FakeTensor, name)

        def read(fake: FakeTensor) -> Any:
            frame = sys._getframe(1)
            while frame.f_back and frame.f_globals.get("__name__") == _ANSWERS:
                frame = frame.f_back
            if asks(frame.f_code):
                module = frame.f_globals.get("__name__", "")
                if not is_library(module):
                    notes.add(_note(module, frame.f_code))
            return original.__get__(fake)

        return property(read, getattr(original, "fset", None))

    with (
        mock.patch.object(FakeTensor, "device", noting("device", _compares_cuda)),
        mock.patch.object(FakeTensor, "is_cuda", noting("is_cuda", lambda _: True)),
    ):
        yield


def _note(module: str, code: types.CodeType) -> str:
    return (
        f"{module}.{code.co_qualname} asks whether a tensor is on CUDA: traced as on "
        "the CPU, so that what it does on CUDA alone is not predicted"
    )


@functools.cache
def _compares_cuda(code: types.CodeType) -> bool:
    """Whether code compares something with a name of CUDA's."""
    steps = list(dis.get_instructions(code))
    for position, step in enumerate(steps):
        if step.opname == "LOAD_CONST" and _names_cuda(step.argval):
            near = steps[max(position - 2, 0) : position + _NEAR + 1]
            if any(x.opname in _COMPARISONS or x.argval == "startswith" for x in near):
                return True
    return False


def _names_cuda(constant: object) -> bool:
    names = constant if isinstance(constant, (tuple, frozenset)) else (constant,)
    return any(isinstance(name, str) and name.startswith("cuda") for name in names)
