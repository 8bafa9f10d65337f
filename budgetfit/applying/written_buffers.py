"""Buffers that a block's forward writes to, when the block runs a second time.

Batch norms count running statistics, spectral norms iterate, queues move on. A block
that is recomputed must find the buffers that its forward found, else it computes
something else; and what its forward left in them must stay, else they move on twice in
a step. So a recomputation works on copies.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn

# Larger ones are tables that are read: masks, positions, rotations.
MOST_ELEMENTS = 2**16


class _Held(NamedTuple):
    """A buffer before a forward: the tensor, how often it was written to, a copy.

    No copy where only what is written matters, and not what was there before.
    """

    module: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None

    def is_written(self) -> bool:
        """Whether the forward wrote to it, or put another tensor in its place."""
        if isinstance(self.module, _NormBase):
            return self.module.training  # its kernels do not count what they write
        now = self.module._buffers.get(self.name)  # noqa: SLF001
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
        self._places = [
            (module, name)
            for module in block.modules()
            for name, buffer in module._buffers.items()  # noqa: SLF001
            if buffer is not None and buffer.numel() <= MOST_ELEMENTS
        ]

    def repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` for one forward and its recomputations."""
        return _Repeatable(self, function) if self._places else function

    def hold(self) -> list[_Held]:
        """Copy what the forward may write to."""
        held = []
        for module, name in self._places:
            buffer = module._buffers.get(name)  # noqa: SLF001
            if buffer is not None:
                only_counts = module.training and _is_torchs_norm(module)
                copy = None if only_counts else buffer.detach().clone()
                held.append(_Held(module, name, buffer, buffer._version, copy))  # noqa: SLF001
        return held

    def learn(self, held: list[_Held]) -> list[_Held]:
        """Return what was written to; the rest is not looked at again."""
        written = [each for each in held if each.is_written()]
        self._places = [(each.module, each.name) for each in written]
        return written


class _Repeatable:
    """A block's forward: the first call is the forward, others recompute it."""

    def __init__(self, owner: WrittenBuffers, function: Callable[..., Any]) -> None:
        self._owner, self._function = owner, function
        self._before: list[_Held] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the block."""
        if self._before is not None:
            with _as_before(self._before):
                return self._function(*args, **kwargs)
        held = self._owner.hold()
        output = self._function(*args, **kwargs)
        self._before = self._owner.learn(held)
        return output


def _is_torchs_norm(module: nn.Module) -> bool:
    """Whether it normalises with the batch's own statistics while it trains."""
    return isinstance(module, _NormBase) and type(module).__module__.startswith(
        "torch.nn.modules."
    )


@contextmanager
def _as_before(held: list[_Held]) -> Iterator[None]:
    """Put copies of buffers as they were in their places, and the real ones back.

    Torch's norms keep theirs and count nothing in the meantime: no byte is needed, but
    for a number where ``SyncBatchNorm`` insists on counting.
    """
    copied = [each for each in held if each.copy is not None]
    counting = {each.module for each in held if each.copy is None}
    now = [each.module._buffers.get(each.name) for each in copied]  # noqa: SLF001
    try:
        for each in copied:
            each.module._buffers[each.name] = each.copy.clone()  # type: ignore[union-attr] # noqa: SLF001
        with ExitStack() as stack:
            for module in counting:
                stack.enter_context(_standing_still(module))
            yield
    finally:
        for each, tensor in zip(copied, now, strict=True):
            each.module._buffers[each.name] = tensor  # noqa: SLF001


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
