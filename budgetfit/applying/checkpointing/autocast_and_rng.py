"""Autocast, default device and RNG state of a forward, for its recomputation."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError, get_device_states, set_device_states


class ForwardContext:
    """Snapshot of autocast and default device, to re-enter in backward.

    ``device_type``: that of the block's input.
    """

    def __init__(self, device_type: str) -> None:
        self._device = torch.get_default_device()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((device_type, "cpu"))
            if torch.amp.is_autocast_available(kind)
        ]

    @property
    def state(self) -> tuple[object, ...]:
        """What two of them are compared by."""
        return self._device, self._cache, self._autocast

    @contextmanager
    def reentered(self) -> Iterator[None]:
        """Enter the saved autocast and default device."""
        with ExitStack() as stack:
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled, cache_enabled=self._cache)
                )
            yield


class RngState:
    """Snapshot of the RNG states of the CPU and of the tensors' devices."""

    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        self.cpu = torch.get_rng_state()
        self.devices, self.states = get_device_states(*tensors)

    def restore(self) -> None:
        """Set the saved RNG states."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states)


@contextmanager
def preserved_rng(states: list[RngState], device_type: str) -> Iterator[None]:
    """Preserve the RNG states of the devices of ``states`` (``fork_rng``)."""
    devices = sorted({device for state in states for device in state.devices})
    kind = "cuda" if device_type == "cpu" else device_type  # unused without devices
    with torch.random.fork_rng(devices, enabled=bool(states), device_type=kind):
        yield


class SavedByAutograd:
    """A tensor saved through ``ctx.save_for_backward``.

    Unlike a plain reference, this detects in-place modification, and an outer
    checkpoint can drop and recompute the tensor.
    """

    def __init__(self, x: torch.Tensor) -> None:
        anchor = torch.empty(
            (0,), requires_grad=True
        )  # no bytes; requires a graph node
        # Keep the output, not only its node: in torch 2.11 a node's saved tensors are
        # freed with its last output.
        self._output = _Keep.apply(anchor, x)

    def get(self) -> torch.Tensor:
        """Return the tensor."""
        node: Any = self._output.grad_fn
        (x,) = node.saved_tensors
        return x


class _Keep(torch.autograd.Function):
    """Saves its second argument and computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty((0,))

    @staticmethod
    def backward(ctx: object, *_: torch.Tensor) -> Any:
        del ctx
        raise CheckpointError("Nothing is computed from this node.")
