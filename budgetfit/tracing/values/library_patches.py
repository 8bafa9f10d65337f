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
    from collections.abc import Callable, Iterator

    import numpy as np

    from budgetfit.tracing.values.known_values import KnownValues


@contextlib.contextmanager
def values_matter(values: KnownValues) -> Iterator[None]:
    """Let libraries treat fake tensors as real ones while the context is open."""
    with (
        _transformers_asks(),
        _numpy_reads(values),
        _numbers_in_text(),
        _lists_of_tensors(),
        _conversions_to_the_same(),
    ):
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

    with _method_of_fakes("numpy", numpy):
        yield


@contextlib.contextmanager
def _numbers_in_text() -> Iterator[None]:
    """Write lone numbers into text as real tensors do: ``f"expert_{index}"``."""

    def written(fake: FakeTensor, form: str) -> str:
        return (
            format(fake.item(), form)
            if fake.dim() == 0
            else object.__format__(fake, form)
        )

    with _method_of_fakes("__format__", written):
        yield


@contextlib.contextmanager
def _method_of_fakes(name: str, method: Callable[..., Any]) -> Iterator[None]:
    before = vars(FakeTensor).get(name)
    setattr(FakeTensor, name, method)
    try:
        yield
    finally:
        if before is None:
            delattr(FakeTensor, name)
        else:
            setattr(FakeTensor, name, before)


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


@contextlib.contextmanager
def _conversions_to_the_same() -> Iterator[None]:
    """Let a forward say ``layer.to(dtype)`` where the layer is of that dtype.

    A module puts a fake weight's conversion in its place, which it may not where
    anybody watches the weight; of a real one it would only take the same data again.
    """
    original = torch.utils.swap_tensors

    def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
        same = one.dtype == other.dtype and one.shape == other.shape
        if not same or one.untyped_storage()._cdata != other.untyped_storage()._cdata:
            original(one, other)

    torch.utils.swap_tensors = swap_tensors
    try:
        yield
    finally:
        torch.utils.swap_tensors = original
