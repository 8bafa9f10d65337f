"""What autograd saves waits in pinned host memory; backward brings it back.

Torch's offload policies recompute silently in eager mode (solver-facts 2.4) and
``save_on_cpu`` copies every view of a storage by itself (solver-facts 5, P6), so these
are saved-tensor hooks of our own. What is moved does not depend on sizes: the program
is the same at every batch size.

In program order, so that a replay of the allocator is exact:

* Each storage is copied once, when autograd first saves a part of it. The device's
  tensors are held until the end of the block's forward; there the kernels' stream
  waits for the copies, and only then they are let go. ``record_stream`` would free
  them whenever the copies happen to be done.
* The first saved tensor that backward asks for brings all of the block's back, the
  last one first, each with an event of its own to wait for. A buffer is let go
  with the last tensor that is read from it.
* A tensor that was written to after it was saved is refused, as by autograd. Copies are
  made in the order of the kernels, so a write after the block's forward comes too
  late to be seen, and the copy is right. As with autograd, writes through ``.data``
  are nobody's concern.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from budgetfit.applying.host_copy import (
    copies_so_far,
    to_device,
    to_host,
    wait_for_copies,
)
from budgetfit.applying.pytree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from budgetfit.applying.host_copy import Copies


def run_offloaded(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    module: nn.Module | None = None,
    at_the_end: bool = False,
) -> Any:  # noqa: ANN401 - whatever the block returns
    """Run one block; what autograd saves of it waits in host memory.

    The first tensor among the arguments, the hidden state, goes to the host as well.
    What other blocks share stays on the device: all other tensors among the arguments,
    parameters and buffers; and so do single numbers. Copies that autocast made of
    parameters are made anew in backward. Without gradients the block just runs.

    Args:
        forward: The block's forward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        module: Whose parameters and buffers stay; by default the object whose method
            ``forward`` is.
        at_the_end: Copy when the block has run: an op fills what autograd has saved.

    Returns:
        What ``forward`` returns. Reading a saved tensor in backward raises a
        ``RuntimeError`` if it was written to after it was saved.
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
    stash = _Stash(
        x.device, lambda storage: storage not in staying, at_the_end=at_the_end
    )
    with stash.filled():
        return forward(*args, **kwargs)


@contextlib.contextmanager
def inputs_on_host(x: torch.Tensor) -> Iterator[None]:
    """Let ``x`` wait in host memory where a checkpoint inside saves it as its input.

    Open it around a call of non-reentrant ``checkpoint``, or of ``SegmentRegion`` for a
    segment's first block. Hooks of checkpoints are the inner ones, so nothing is seen
    here but what they save themselves. All but ``x`` stays on the device; its memory
    there is let go at the end of the context, as far as it is ours.
    """
    moving = _storages([x])
    stash = _Stash(x.device, lambda storage: storage in moving)
    del x
    with stash.filled():
        yield


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {_storage(tensor) for tensor in tensors if _has_storage(tensor)}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001 - its identity


def _has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but bytes of one storage, its shape and strides."""
    return (
        tensor.layout is torch.strided
        and not is_traceable_wrapper_subclass(tensor)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


class _Stash:
    """What one block saves: filled in its forward, then owned by the graph.

    Args:
        device: Of the tensors to be moved; those elsewhere stay where they are.
        moves: Says by a tensor's storage whether it is moved.
        at_the_end: Whether to copy at the end of the block, and not at once.
    """

    def __init__(
        self,
        device: torch.device,
        moves: Callable[[int], bool],
        *,
        at_the_end: bool = False,
    ) -> None:
        self._device = device
        self._moves = moves
        self._at_the_end = at_the_end
        # All of the block's copies, which know this list. Not kept alive by it: what
        # the graph drops is freed.
        self._block: list[weakref.ref[_HostCopy]] = []
        self._copies: dict[tuple[int, int], _HostCopy] = {}
        self._sources: list[tuple[torch.Tensor, _Piece]] = []

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Move what autograd saves inside the context."""
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._close()

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        if not self._can_move(tensor):
            return _Stayed(tensor, _version(tensor))
        parameter = _cast_from(tensor)
        if parameter is not None and not self._moves(_storage(parameter)):
            return _Cast(parameter, _version(parameter), _Layout.of(tensor))
        # The version is part of the name: what was written to is copied again.
        key = _storage(tensor), _version(tensor)
        if key not in self._copies:
            host = None if self._at_the_end else to_host(_whole(tensor))
            copy = _HostCopy(self._device, host, self._block)
            self._copies[key] = copy
            self._block.append(weakref.ref(copy))
        piece = _Piece(self._copies[key], _version(tensor), _Layout.of(tensor))
        self._copies[key].waited_for.add(piece)
        self._sources.append((tensor, piece))
        return piece

    def _can_move(self, tensor: torch.Tensor) -> bool:
        # By dimensions, not bytes: they are the same at every batch size.
        return (
            tensor.dim() > 0
            and tensor.numel() > 0
            and tensor.device == self._device
            and _has_storage(tensor)
            and self._moves(_storage(tensor))
        )

    def _close(self) -> None:
        """Let the device's tensors go, once they are copied."""
        for tensor, piece in self._sources:
            piece.overwritten = _version(tensor) != piece.version
            if piece.copy.host is None:
                piece.copy.host = to_host(_whole(tensor))
        wait_for_copies(self._device)
        self._sources.clear()
        self._copies.clear()


class _Layout(NamedTuple):
    """Which part of a storage a tensor is."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tensor.shape, tensor.stride(), offset)

    def in_(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of a storage that ``whole`` is a view of."""
        if whole.dtype != self.dtype:
            whole = whole.view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.offset)


class _HostCopy:
    """One storage in host memory, and on the device while backward reads it."""

    def __init__(
        self,
        device: torch.device,
        host: torch.Tensor | None,
        block: list[weakref.ref[_HostCopy]],
    ) -> None:
        self._device = device
        self.host = host  # None until the block has run, where it is copied then
        self._block = block
        self.brought = False
        self._buffer: torch.Tensor | None = None
        self._arrival: Copies | None = None
        # Dead ones leave by themselves: autograd never asked for them.
        self.waited_for: weakref.WeakSet[_Piece] = weakref.WeakSet()

    def read(self, piece: _Piece) -> torch.Tensor:
        """Return ``piece`` on the device."""
        if self._buffer is None and not self.brought:
            self._bring_block_back()
        # Gone already, where the graph is gone through once more: this one alone.
        buffer = self.ask_for() if self._buffer is None else self._buffer
        self._wait()
        self.waited_for.discard(piece)
        if not self.waited_for:
            self._buffer = None  # autograd frees it with the node that reads it
        return piece.layout.in_(buffer)

    def _bring_block_back(self) -> None:
        for reference in reversed(self._block):
            copy = reference()
            if copy is not None and not copy.brought:
                copy.ask_for()

    def ask_for(self) -> torch.Tensor:
        """Have the storage copied to the device; return it, not yet to be read."""
        if self.host is None:
            raise RuntimeError(_TOO_EARLY)
        self.brought = True
        self._buffer = to_device(self.host, self._device)
        self._arrival = copies_so_far(self._device)
        return self._buffer

    def _wait(self) -> None:
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None

    def __del__(self) -> None:
        # A graph may go before all of it was read; the buffer's memory must not be used
        # for anything else while the copy is still on its way into it.
        if self._buffer is not None:
            self._wait()


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Piece:
    """Stands for a saved tensor whose storage was moved."""

    copy: _HostCopy
    version: int
    layout: _Layout
    overwritten: bool = False

    def get(self) -> torch.Tensor:
        if self.overwritten:
            raise RuntimeError(_OVERWRITTEN)
        return self.copy.read(self)


class _Stayed(NamedTuple):
    """A saved tensor that is where it was."""

    tensor: torch.Tensor
    version: int

    def get(self) -> torch.Tensor:
        if _version(self.tensor) != self.version:
            raise RuntimeError(_OVERWRITTEN)
        return self.tensor


class _Cast(NamedTuple):
    """Stands for autocast's copy of a parameter: cheaper made anew than moved."""

    parameter: torch.Tensor
    version: int
    layout: _Layout

    def get(self) -> torch.Tensor:
        if _version(self.parameter) != self.version:
            raise RuntimeError(_OVERWRITTEN)
        return self.layout.in_(self.parameter.detach().to(self.layout.dtype))


_Packed = _Piece | _Stayed | _Cast

_OVERWRITTEN = (
    "A tensor that backward needs was modified by an in-place operation after it was "
    "saved. Do not write to it, or keep this block on the device."
)


_TOO_EARLY = (
    "A block with RReLU computes gradients inside its own forward, before its saved "
    "tensors are in host memory. Keep or recompute this block instead of offloading it."
)


def _unpack(packed: _Packed) -> torch.Tensor:
    return packed.get()


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to, its views and aliases included."""
    return tensor._version  # noqa: SLF001 - autograd's notes name it so


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's storage, in one dimension."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((length,), (1,), 0)


def _cast_from(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the leaf that this is a copy of in another dtype, or a view of one."""
    whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001
    node = whole.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    if leaf is None or leaf.dtype == whole.dtype or leaf.device != whole.device:
        return None
    return leaf
