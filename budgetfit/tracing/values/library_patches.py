"""Monkeypatches for code that treats FakeTensor specially: transformers, numpy, hooks.

transformers does not read masks and position ids of fake tensors, and builds attention
masks of length^2 that a real step does not have. Their values are known here
(``known_values``), so it may read them. Conversions to numpy (scipy's matching of
boxes) and lists of tensors get values as well.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

if TYPE_CHECKING:
    import numpy as np

    from budgetfit.tracing.values.known_values import KnownValues


@contextlib.contextmanager
def patch_libraries(values: KnownValues) -> Iterator[None]:
    """Make libraries treat fake tensors as real ones while the context is open."""

    def numpy(fake: FakeTensor, *, force: bool = False) -> np.ndarray[Any, Any]:  # noqa: ARG001
        return values.array_of(fake)

    # What ``with torch.device(...)`` acts on is collected once, in its first use: from
    # the patched functions it would leave out the real ones for good.
    _device_constructors()
    item_by_item = FakeTensor.tolist

    def tolist(fake: FakeTensor) -> object:
        # torch reads each item with an op of its own: minutes for long offsets.
        if fake.is_floating_point() or values.value(fake) is None:
            return item_by_item(fake)
        return values.array_of(fake).tolist()

    patches: list[tuple[Any, str, Any]] = [
        (FakeTensor, "numpy", numpy),
        (FakeTensor, "tolist", tolist),
        (FakeTensor, "__format__", _formatted),
        (FakeTensor, "__getitem__", _indexed_by_lists(torch.Tensor.__getitem__)),
        (FakeTensor, "__setitem__", _indexed_by_lists(torch.Tensor.__setitem__)),
        (torch, "tensor", _reading_lists(torch.tensor)),
        (torch.utils, "swap_tensors", _swapping_others(torch.utils.swap_tensors)),
        (torch.autograd.graph.save_on_cpu, "__init__", _saving_on_host),
    ]
    transformers = sys.modules.get("transformers.utils.import_utils")
    if hasattr(transformers, "is_fake_tensor"):
        patches.append((transformers, "is_fake_tensor", lambda _: False))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def _saving_on_host(
    self: torch.autograd.graph.save_on_cpu,
    pin_memory: bool = False,
    device_type: str = "cuda",  # noqa: ARG001 - torch's signature
) -> None:
    """Pack saved tensors with an op that a trace knows as a copy to the host."""
    # ``save_on_cpu`` copies to the CPU, where all tensors of a trace are. Host memory
    # that is not pinned keeps the order of strides.

    def pack(x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        order, strides = list(range(x.dim())), x.stride()
        if not pin_memory:
            order.sort(key=lambda dim: -strides[dim])
        return torch.ops.budgetfit.to_host.default(x.permute(order)), order

    def unpack(packed: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
        host, order = packed
        copy = torch.ops.budgetfit.to_device.default(host, host.device)
        return copy.permute([order.index(dim) for dim in range(copy.dim())])

    torch.autograd.graph.saved_tensors_hooks.__init__(self, pack, unpack)


def _formatted(fake: FakeTensor, form: str) -> str:
    """Format fake scalars as real ones: ``f"expert_{index}"``."""
    if fake.dim() == 0:
        return format(fake.item(), form)
    return object.__format__(fake, form)


def _reading_lists(original: Callable[..., torch.Tensor]) -> Callable[..., object]:
    """Make ``torch.tensor`` accept lists of fakes; it reads them without a dispatch."""

    @functools.wraps(original)
    def tensor(data: object, *args: object, **kwargs: object) -> torch.Tensor:
        if isinstance(data, (list, tuple)):
            data = _read(data)
        return original(data, *args, **kwargs)

    return tensor


def _indexed_by_lists(original: Callable[..., object]) -> Callable[..., object]:
    """Make indexing accept lists of fakes: ``x[rows, columns] = 0``."""

    @functools.wraps(original)
    def at(tensor: torch.Tensor, index: object, *value: object) -> Any:
        if isinstance(index, list):
            index = _read(index)
        elif isinstance(index, tuple):
            lists = (list, tuple)
            index = tuple(_read(x) if isinstance(x, lists) else x for x in index)
        return original(tensor, index, *value)

    return at


def _read(data: Any) -> object:
    if isinstance(data, FakeTensor):
        return data.tolist()
    return type(data)(map(_read, data)) if type(data) in (list, tuple) else data


def _swapping_others(original: Callable[..., None]) -> Callable[..., None]:
    """Make ``layer.to(dtype)`` a no-op in a forward if the layer has that dtype."""
    # ``Module.to`` swaps a fake weight with its conversion (``swap_tensors``), which
    # raises if there are weak references to it; of a real weight it only sets
    # ``.data``.

    def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
        same = one.dtype == other.dtype and one.shape == other.shape
        if not same or one.untyped_storage()._cdata != other.untyped_storage()._cdata:
            original(one, other)

    return swap_tensors
