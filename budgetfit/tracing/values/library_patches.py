"""Monkeypatches for libraries that treat FakeTensor specially: transformers, numpy.

transformers does not read masks and position ids of fake tensors, and builds attention
masks of length^2 that a real step does not have. Their values are known here
(``known_values``), so it may read them. Conversions to numpy (scipy's matching of
boxes) and lists of tensors get values as well.
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
def patch_libraries(values: KnownValues) -> Iterator[None]:
    """Make libraries treat fake tensors as real ones while the context is open."""
    with (
        _transformers_reads(),
        _numpy_reads(values),
        _numbers_in_text(),
        _lists_of_tensors(),
        _conversions_to_the_same(),
    ):
        yield


@contextlib.contextmanager
def _transformers_reads() -> Iterator[None]:
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
    """Implement ``.numpy()`` for fake tensors with known values."""

    def numpy(fake: FakeTensor, *, force: bool = False) -> np.ndarray[Any, Any]:  # noqa: ARG001
        return values.array_of(fake)

    with _method_of_fakes("numpy", numpy):
        yield


@contextlib.contextmanager
def _numbers_in_text() -> Iterator[None]:
    """Format fake scalars as real ones: ``f"expert_{index}"``."""

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
    """Make ``torch.tensor`` accept lists of fakes; it reads them without a dispatch."""
    original = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, (list, tuple)):
            data = _read(data)
        return original(data, *args, **kwargs)

    torch.tensor = functools.wraps(original)(tensor)
    try:
        yield
    finally:
        torch.tensor = original


def _read(data: Any) -> Any:
    if isinstance(data, FakeTensor):
        return data.tolist()
    if isinstance(data, (list, tuple)):
        return type(data)(map(_read, data)) if type(data) in (list, tuple) else data
    return data


@contextlib.contextmanager
def _conversions_to_the_same() -> Iterator[None]:
    """Make ``layer.to(dtype)`` a no-op in a forward if the layer has that dtype.

    ``Module.to`` swaps a fake weight with its conversion (``swap_tensors``), which
    raises if there are weak references to it; of a real weight it only sets ``.data``.
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
