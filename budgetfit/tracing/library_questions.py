"""Libraries that behave differently when they notice fake tensors, told not to.

transformers skips looking at masks and position ids when it believes that a graph is
being traced, and then builds attention masks of length^2 that a real step does not
have. Here the values are known (``known_values``), so it may ask. What leaves torch for
numpy (scipy's matching of boxes) gets values as well, and so do lists of tensors.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from budgetfit.tracing.known_values import KnownValues


@contextlib.contextmanager
def values_matter(values: KnownValues) -> Iterator[None]:
    """Let libraries treat fake tensors as real ones while the context is open."""
    with _transformers_asks(), _numpy_reads(values), _lists_of_tensors():
        yield


@contextlib.contextmanager
def _transformers_asks() -> Iterator[None]:
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if module is None or original is None:
        yield
        return
    module.is_fake_tensor = lambda _: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = original  # type: ignore[attr-defined]


@contextlib.contextmanager
def _numpy_reads(values: KnownValues) -> Iterator[None]:
    """Answer ``.numpy()``, which real tensors have and fakes refuse."""

    def numpy(fake: FakeTensor, *, force: bool = False) -> np.ndarray[Any, Any]:  # noqa: ARG001
        return values.array_of(fake)

    before = vars(FakeTensor).get("numpy")
    FakeTensor.numpy = numpy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if before is None:
            del FakeTensor.numpy
        else:
            FakeTensor.numpy = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _lists_of_tensors() -> Iterator[None]:
    """Let ``torch.tensor`` take lists of fakes: it reads each for itself, unasked."""
    original = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        if isinstance(data, (list, tuple)):
            data = _read(data)
        return original(data, *args, **kwargs)

    torch.tensor = functools.wraps(original)(tensor)
    try:
        yield
    finally:
        torch.tensor = original


def _read(data: Any) -> Any:  # noqa: ANN401 - numbers, tensors and lists of those
    if isinstance(data, FakeTensor):
        return data.tolist()
    if isinstance(data, (list, tuple)):
        return type(data)(map(_read, data)) if type(data) in (list, tuple) else data
    return data
