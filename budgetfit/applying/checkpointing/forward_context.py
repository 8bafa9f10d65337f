"""What surrounds a forward and is gone in backward: autocast, device, generators."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import (
    CheckpointError,
    get_device_states,
    set_device_states,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class ForwardContexts:
    """Autocast and default device as they are now, to be entered again in backward."""

    def __init__(self, x: torch.Tensor) -> None:
        self._device = torch.get_default_device()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((x.device.type, "cpu"))
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Make them hold again."""
        with ExitStack() as stack:
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled, cache_enabled=self._cache)
                )
            yield


class RandomState:
    """The generators' state now, of the CPU and of the tensors' devices."""

    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        self.cpu = torch.get_rng_state()
        self.devices, self.states = get_device_states(*tensors)

    def restore(self) -> None:
        """Draw the same numbers again from here on."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices, self.states)


@contextmanager
def generators_kept(states: list[RandomState], device_type: str) -> Iterator[None]:
    """Leave the generators of ``states`` where they are, whatever is drawn inside."""
    devices = sorted({device for state in states for device in state.devices})
    kind = "cuda" if device_type == "cpu" else device_type  # only read with devices
    with torch.random.fork_rng(devices, enabled=bool(states), device_type=kind):
        yield


class SavedByAutograd:
    """A tensor as autograd saves one.

    Autograd refuses to give back a tensor that was overwritten, and a checkpoint around
    this one may recompute it; a plain reference does neither.
    """

    def __init__(self, x: torch.Tensor) -> None:
        anchor = torch.empty((0,), requires_grad=True)  # no bytes; calls for a node
        # The output is kept, not its node alone: in torch 2.11 a node's
        # saved tensors go with its last output, whoever still holds the node.
        self._output = _Keep.apply(anchor, x)

    def get(self) -> torch.Tensor:
        """Return the tensor."""
        node: Any = self._output.grad_fn
        (x,) = node.saved_tensors
        return x


class _Keep(torch.autograd.Function):
    """Saves its second argument and computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(x)
        return anchor.new_empty((0,))

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:  # noqa: ANN401
        del ctx
        raise CheckpointError("Nothing is computed from this node.")
