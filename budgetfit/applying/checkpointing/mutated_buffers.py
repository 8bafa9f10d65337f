"""Buffers that a block's forward writes to, when the block runs a second time.

Batch norms count running statistics, spectral norms iterate, queues move on. A block
that is recomputed must find the buffers that its forward found, else it computes
something else; and what its forward left in them must stay, else they move on twice in
a step. So a recomputation works on copies. Tensors that are attributes alone are held
like buffers.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

# Larger ones are tables that are read: masks, positions, rotations.
MOST_ELEMENTS = 2**16
_TABLES = ("_buffers", "__dict__")


class HeldBuffer(NamedTuple):
    """A buffer before a forward: the tensor, how often it was written to, a copy.

    No copy where only what is written matters, and not what was there before.
    """

    module: nn.Module
    table: str
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @property
    def tensors(self) -> dict[str, Any]:
        """The module's buffers, or its attributes."""
        return getattr(self.module, self.table)

    def is_written(self) -> bool:
        """Whether the forward wrote to it, or put another tensor in its place."""
        if isinstance(self.module, _NormBase):
            return self.module.training  # its kernels do not count what they write
        now = self.tensors.get(self.name)
        # Counts writes: torch's notes on autograd, "In-place correctness checks".
        return now is not self.tensor or now._version != self.version  # noqa: SLF001


class WrittenBuffers:
    """Knows which buffers of a block its forward writes to, from the first run on.

    Until then all that are small are copied for a moment; after that those alone, and
    nothing at all where it writes to none.

    Args:
        block: Whose buffers they are.
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

    def hold(self, *, every: bool = False) -> list[HeldBuffer]:
        """Copy what the forward may write to.

        Args:
            every: Look at all again, and copy also what norms only count.
        """
        held = []
        for module, table, name in self._small if every else self._places:
            tensor = getattr(module, table).get(name)
            if isinstance(tensor, torch.Tensor):
                only_counts = module.training and _is_torchs_norm(module) and not every
                copy = None if only_counts else tensor.detach().clone()
                version = tensor._version  # noqa: SLF001
                held.append(HeldBuffer(module, table, name, tensor, version, copy))
        return held

    def learn(self, held: list[HeldBuffer]) -> list[HeldBuffer]:
        """Return what was written to; what never was is not looked at again."""
        written = [each for each in held if each.is_written()]
        places = [(each.module, each.table, each.name) for each in written]
        if self._places is self._small:
            self._places = []
        self._places += [place for place in places if place not in self._places]
        return written


def _is_state(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.requires_grad
        and value.numel() <= MOST_ELEMENTS
    )


def _is_torchs_norm(module: nn.Module) -> bool:
    """Whether it normalises with the batch's own statistics while it trains."""
    return isinstance(module, _NormBase) and type(module).__module__.startswith(
        "torch.nn.modules."
    )


@contextmanager
def buffers_as_before(held: list[HeldBuffer]) -> Iterator[None]:
    """Put copies of buffers as they were in their places, and the real ones back.

    Torch's norms keep theirs and count nothing in the meantime: no byte is needed, but
    for a number where ``SyncBatchNorm`` insists on counting.
    """
    copied = [each for each in held if each.copy is not None]
    counting = {each.module for each in held if each.copy is None}
    now = [each.tensors.get(each.name) for each in copied]
    try:
        for each in copied:
            each.tensors[each.name] = each.copy.clone()  # type: ignore[union-attr]
        with ExitStack() as stack:
            for module in counting:
                stack.enter_context(_standing_still(module))
            yield
    finally:
        for each, tensor in zip(copied, now, strict=True):
            each.tensors[each.name] = tensor


@contextmanager
def _standing_still(norm: nn.Module) -> Iterator[None]:
    """Let a norm's statistics be what they are: new = (1 - 0) * old + 0 * batch."""
    momentum, counted = norm.momentum, norm._buffers["num_batches_tracked"]  # noqa: SLF001
    must_count = isinstance(norm, SyncBatchNorm) and counted is not None
    in_vain = counted.clone() if must_count else None  # type: ignore[union-attr]
    norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, in_vain  # type: ignore[assignment] # noqa: SLF001
    try:
        yield
    finally:
        norm.momentum, norm._buffers["num_batches_tracked"] = momentum, counted  # noqa: SLF001
