"""Activation offload: saved tensors are moved to pinned host memory until backward.

Torch's offload policies silently recompute in eager mode, and ``save_on_cpu`` copies
every view of a storage separately, so these are saved-tensor hooks of our own. What is
moved does not depend on sizes: the program is the same at every batch size.

Frees happen in program order, so that a replay of the allocator is exact:

* Each storage is copied once, when autograd first saves a view of it. The device
  tensors are kept until the end of the block's forward, where the compute stream waits
  for the copies; then they are freed. ``record_stream`` would free them at an
  unpredictable time.
* The first saved tensor that backward unpacks prefetches all of the block's storages,
  the last one first, each with its own event to wait for. A buffer is freed with the
  last tensor that is read from it.
* A tensor that was modified in place after it was saved is refused, as by autograd.
  Copies are stream-ordered, so a write after the block's forward does not affect the
  copy. As in autograd, writes through ``.data`` are not detected.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from budgetfit.applying.host_copy import (
    PendingCopies,
    record_copies,
    to_device,
    to_host,
    wait_for_copies,
)
from budgetfit.applying.pytree import tensors_in


def run_with_offload(
    forward: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, Any],
    *,
    module: nn.Module | None = None,
    after_forward: bool = False,
) -> object:
    """Run one block with its saved tensors offloaded to host memory.

    The first tensor among the arguments, the hidden state, is offloaded as well. What
    other blocks share stays on the device: all other tensor arguments, parameters and
    buffers; and 0-dim tensors. Autocast's casts of parameters are recomputed in
    backward. Without grad mode the block just runs.

    ``module``: the block; by default the object that ``forward`` is bound to.
    ``after_forward``: copy after the block's forward, for ops that write to tensors
    that autograd has saved already. Reading a saved tensor in backward raises a
    ``RuntimeError`` if it was modified in place after it was saved.
    """
    while isinstance(forward, functools.partial):
        args, kwargs = (*forward.args, *args), {**forward.keywords, **kwargs}
        forward = forward.func
    x = next(tensors_in((args, kwargs)), None)
    if x is None or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    owner = getattr(forward, "__self__", None) if module is None else module
    own = (
        [*owner.parameters(), *owner.buffers()] if isinstance(owner, nn.Module) else []
    )
    staying = _storages([*tensors_in((args, kwargs)), *own]) - _storages([x])
    offload = _BlockOffload(
        x.device, lambda storage: storage not in staying, after_forward=after_forward
    )
    with offload.saved_tensors_offloaded():
        return forward(*args, **kwargs)


@contextlib.contextmanager
def offload_checkpoint_input(x: torch.Tensor) -> Iterator[None]:
    """Offload ``x`` where a checkpoint inside saves it as its input.

    Enter it around a call of non-reentrant ``checkpoint``, or of ``SegmentCheckpoint``
    for a segment's first block. The checkpoint's own hooks are inner ones, so these see
    only what it saves itself. All but ``x`` stays on the device.
    """
    moving = _storages([x])
    offload = _BlockOffload(x.device, lambda storage: storage in moving)
    del x
    with offload.saved_tensors_offloaded():
        yield


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors if _has_storage(tensor)}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain strided view of one storage."""
    return (
        tensor.layout is torch.strided
        and not is_traceable_wrapper_subclass(tensor)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


class _BlockOffload:
    """Saved-tensor hooks of one block's forward; afterwards owned by the graph.

    Tensors of other devices stay. ``moves``: whether a storage is moved.
    ``after_forward``: whether to copy at the end of the block instead of at once.
    """

    def __init__(
        self,
        device: torch.device,
        moves: Callable[[int], bool],
        *,
        after_forward: bool = False,
    ) -> None:
        self._device = device
        self._moves = moves
        self._after_forward = after_forward
        # The block's storages, for prefetching. Weak: what the graph drops is freed.
        self._block: list[weakref.ref[_OffloadedStorage]] = []
        # By storage and version: the copy, and the tensor that it was made for.
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, _OffloadedStorage]] = {}
        self._sources: list[tuple[torch.Tensor, _OffloadedTensor]] = []

    @contextlib.contextmanager
    def saved_tensors_offloaded(self) -> Iterator[None]:
        """Offload what autograd saves inside the context."""
        try:
            with saved_tensors_hooks(self._pack, operator.methodcaller("get")):
                yield
        finally:
            self._close()

    def _pack(self, tensor: torch.Tensor) -> _SavedTensor:
        if not self._can_move(tensor):
            return _KeptTensor(tensor, tensor._version)
        parameter = _autocast_source(tensor)
        if parameter is not None and not self._moves(_storage(parameter)):
            return _KeptTensor(parameter, parameter._version, _Layout.of(tensor))
        # With the version, so that a tensor modified in between is copied again.
        key = _storage(tensor), tensor._version
        source, copy = self._copies.get(key, (tensor, None))
        if copy is None or not _counts_the_same_writes(tensor, source):
            host = None if self._after_forward else to_host(_flat_storage(tensor))
            copy = _OffloadedStorage(self._device, host, self._block)
            self._copies[key] = tensor, copy
            self._block.append(weakref.ref(copy))
        piece = _OffloadedTensor(copy, tensor._version, _Layout.of(tensor))
        copy.waiting.add(piece)
        self._sources.append((tensor, piece))
        return piece

    def _can_move(self, tensor: torch.Tensor) -> bool:
        # By dimensions, not bytes: the same at every batch size.
        return (
            tensor.dim() > 0
            and tensor.numel() > 0
            and tensor.device == self._device
            and _has_storage(tensor)
            and self._moves(_storage(tensor))
        )

    def _close(self) -> None:
        """Free the device tensors after the copies."""
        for tensor, piece in self._sources:
            piece.overwritten = tensor._version != piece.version
            if piece.copy.host is None:
                piece.copy.host = to_host(_flat_storage(tensor))
        wait_for_copies(self._device)
        self._sources.clear()
        self._copies.clear()


class _Layout(NamedTuple):
    """View of a storage: dtype, size, stride and offset."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tensor.shape, tensor.stride(), offset)

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this view of the storage of ``whole``."""
        if whole.dtype != self.dtype:
            whole = whole.view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.offset)


class _OffloadedStorage:
    """One storage in host memory, and its device buffer during backward."""

    def __init__(
        self,
        device: torch.device,
        host: torch.Tensor | None,
        block: list[weakref.ref[_OffloadedStorage]],
    ) -> None:
        self._device = device
        self.host = host  # None until the end of forward with after_forward
        self._block = block
        self.prefetched = False
        self._buffer: torch.Tensor | None = None
        self._pending: PendingCopies | None = None
        # Weak: autograd may drop tensors that it never unpacks.
        self.waiting: weakref.WeakSet[_OffloadedTensor] = weakref.WeakSet()

    def read(self, piece: _OffloadedTensor) -> torch.Tensor:
        """Return ``piece`` on the device; frees the buffer after the last one."""
        if self._buffer is None and not self.prefetched:
            for reference in reversed(self._block):
                copy = reference()
                if copy is not None and not copy.prefetched:
                    copy.prefetch()
        # Freed already: a second backward (retain_graph) copies each storage again.
        buffer = self.prefetch() if self._buffer is None else self._buffer
        self._wait()
        self.waiting.discard(piece)
        if not self.waiting:
            self._buffer = None  # autograd frees it with the node that reads it
        return piece.layout.view(buffer)

    def prefetch(self) -> torch.Tensor:
        """Start the copy to the device; ``_wait`` before reading the buffer."""
        if self.host is None:
            raise RuntimeError(_READ_BEFORE_COPY)
        self.prefetched = True
        self._buffer = to_device(self.host, self._device)
        self._pending = record_copies(self._device)
        return self._buffer

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def __del__(self) -> None:
        # A graph may be freed before all of it was read; the buffer must not be reused
        # while the copy into it is in flight.
        if self._buffer is not None:
            self._wait()


@dataclass(slots=True, weakref_slot=True, eq=False)
class _OffloadedTensor:
    """A saved tensor with an offloaded storage."""

    copy: _OffloadedStorage
    version: int
    layout: _Layout
    overwritten: bool = False

    def get(self) -> torch.Tensor:
        if self.overwritten:
            raise RuntimeError(_OVERWRITTEN)
        return self.copy.read(self)


class _KeptTensor(NamedTuple):
    """A saved tensor that stays on the device.

    With ``cast``, the parameter of which autocast's cast is recomputed: cheaper than a
    copy.
    """

    tensor: torch.Tensor
    version: int
    cast: _Layout | None = None

    def get(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(_OVERWRITTEN)
        if self.cast is None:
            return self.tensor
        return self.cast.view(self.tensor.detach().to(self.cast.dtype))


_SavedTensor = _OffloadedTensor | _KeptTensor

_OVERWRITTEN = (
    "A tensor that backward needs was modified by an in-place operation after it was "
    "saved. Do not write to it, or keep this block on the device."
)


_READ_BEFORE_COPY = (
    "A block with RReLU computes gradients inside its own forward, before its saved "
    "tensors are in host memory. Keep or recompute this block instead of offloading it."
)


def _counts_the_same_writes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage, at the same version, share its counter.

    What ``unsafe_chunk`` returns, as in a ``GRU`` on a CPU, has counters of its own.
    Tensors that nothing wrote to are taken as alike.
    """
    before = one._version
    if one is other or not before:
        return True
    increment_version(one)
    shared = other._version != before
    torch._C._autograd._unsafe_set_version_counter((one,), (before,))
    return shared


def _flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's storage as a 1-d tensor."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((length,), (1,), 0)


def _autocast_source(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the leaf that this tensor, or its base, is a dtype cast of."""
    whole = tensor if tensor._base is None else tensor._base
    node = whole.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    if leaf is None or leaf.dtype == whole.dtype or leaf.device != whole.device:
        return None
    return leaf
