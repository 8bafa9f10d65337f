"""Restore buffers that a block's forward mutates, for its recomputation.

Batch norms update running statistics, spectral norms iterate, queues advance. A
recomputation must start from the buffers before the forward, else it computes something
else; and it must not update them a second time. So it works on copies. Tensors in plain
attributes are handled like buffers.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

# Larger ones are read-only tables: masks, positions, rotary embeddings.
MAX_ELEMENTS = 2**16
_TABLES = ("_buffers", "__dict__")


class BufferSnapshot(NamedTuple):
    """A buffer before a forward: the tensor, its version counter, a copy.

    No copy where the forward does not read the old values.
    """

    module: nn.Module
    table: str
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @property
    def tensors(self) -> dict[str, Any]:
        """The module's buffers or attributes."""
        return getattr(self.module, self.table)

    def is_mutated(self) -> bool:
        """Whether the forward wrote to it or replaced it."""
        if isinstance(self.module, _NormBase):
            return self.module.training  # its kernels do not bump versions
        now = self.tensors.get(self.name)
        # Version counters: torch's notes on autograd, "In-place correctness checks".
        return now is not self.tensor or now._version != self.version


class MutatedBuffers:
    """Detects which buffers of a block its forward mutates, in its first run.

    The first forward copies all small buffers, later ones only the mutated ones.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._small = [
            (module, table, name)
            for module in block.modules()
            for table in _TABLES
            for name, tensor in getattr(module, table).items()
            if _is_state(tensor)
        ]
        self._places = self._small

    def snapshot(self, *, every: bool = False) -> list[BufferSnapshot]:
        """Copy the buffers that the forward may mutate.

        Args:
            every: All small buffers again, running statistics included.
        """
        held = []
        for module, table, name in self._small if every else self._places:
            tensor = getattr(module, table).get(name)
            if isinstance(tensor, torch.Tensor):
                is_norm = module.training and _is_torchs_norm(module) and not every
                copy = None if is_norm else tensor.detach().clone()
                version = tensor._version
                held.append(BufferSnapshot(module, table, name, tensor, version, copy))
        return held

    def find_mutated(self, held: list[BufferSnapshot]) -> list[BufferSnapshot]:
        """Return the mutated buffers, and remember them for later snapshots."""
        written = [each for each in held if each.is_mutated()]
        places = [(each.module, each.table, each.name) for each in written]
        if self._places is self._small:
            self._places = []
        self._places += [place for place in places if place not in self._places]
        return written


def _is_state(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.requires_grad
        and value.numel() <= MAX_ELEMENTS
    )


def _is_torchs_norm(module: nn.Module) -> bool:
    """Whether it is torch's batch or instance norm: it trains on batch statistics."""
    return isinstance(module, _NormBase) and type(module).__module__.startswith(
        "torch.nn.modules."
    )


@contextmanager
def restored_buffers(held: list[BufferSnapshot]) -> Iterator[None]:
    """Replace mutated buffers by copies of their old values inside the context.

    Torch's norms keep their buffers and do not update them, which takes no memory but a
    scalar for ``SyncBatchNorm``.
    """
    copied = [(each, each.copy) for each in held if each.copy is not None]
    norms = {each.module for each in held if each.copy is None}
    now = [each.tensors.get(each.name) for each, _ in copied]
    try:
        for each, copy in copied:
            each.tensors[each.name] = copy.clone()
        with ExitStack() as stack:
            for module in norms:
                stack.enter_context(_frozen_statistics(module))
            yield
    finally:
        for (each, _), tensor in zip(copied, now, strict=True):
            each.tensors[each.name] = tensor


@contextmanager
def _frozen_statistics(norm: Any) -> Iterator[None]:
    """Freeze running statistics by momentum 0: new = (1 - 0) * old + 0 * batch."""
    momentum, counted = norm.momentum, norm._buffers["num_batches_tracked"]
    must_count = isinstance(norm, SyncBatchNorm) and counted is not None
    scratch_count = counted.clone() if must_count else None
    norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, scratch_count
    try:
        yield
    finally:
        norm.momentum, norm._buffers["num_batches_tracked"] = momentum, counted
