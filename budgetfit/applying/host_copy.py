"""Custom ops for asynchronous copies between the device and pinned host memory.

They are ops rather than calls of ``copy_``, so that a trace recognises by name what
takes no device memory and what goes over the bus: ``core.step_trace.TO_HOST`` and
``TO_DEVICE``. On CPU tensors they clone, which is how their users are tested.
"""

import functools
from typing import NamedTuple

import torch

# Kept alive: deleting it would unregister the ops. A fragment, because several files
# define ops of this namespace.
_LIBRARY = torch.library.Library("budgetfit", "FRAGMENT")
_LIBRARY.define("to_host(Tensor x) -> Tensor")
_LIBRARY.define("to_device(Tensor host, Device device) -> Tensor")


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy ``x`` to pinned host memory on a side stream (device to host).

    On CUDA, ``x`` must not be freed or written to before the current stream waits for
    the copy (``wait_for_copies``).
    """
    return torch.ops.budgetfit.to_host.default(x)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``host`` to device memory that the current stream owns (host to device).

    On CUDA, the result must not be read or freed before the current stream waits for
    the copy (``record_copies``).
    """
    return torch.ops.budgetfit.to_device.default(host, device)


class PendingCopies(NamedTuple):
    """CUDA event after the copies issued so far, and the stream that has to wait."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream

    def wait(self) -> None:
        """Make the recorded stream wait for these copies."""
        self.stream.wait_event(self.event)


def record_copies(device: torch.device) -> PendingCopies | None:
    """Record an event after all copies issued so far; None on CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return PendingCopies(_copy_stream(device).record_event(), stream)


def wait_for_copies(device: torch.device) -> None:
    """Make the current stream wait for all copies issued so far."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_copy_stream(device))


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=device)


def _to_host_on_cuda(x: torch.Tensor) -> torch.Tensor:
    # No pool of our own: torch's CachingHostAllocator keeps freed blocks and reuses
    # them only after the copies into and out of them are done. It rounds up to powers
    # of two, of host memory.
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    stream = _copy_stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
    return host


def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Allocated on the compute stream: the allocator has a pool per stream, and memory
    # of the copy stream could not be reused by kernels.
    copy = torch.empty(host.shape, dtype=host.dtype, device=device)
    if device.type != "cuda":
        return copy.copy_(host)
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(host, non_blocking=True)
    return copy


def _like_on_host(x: torch.Tensor) -> torch.Tensor:
    # In a trace all tensors are on the CPU.
    home = "meta" if x.device.type == "meta" else "cpu"
    return torch.empty(x.shape, dtype=x.dtype, device=home)


def _like_on_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(host.shape, dtype=host.dtype, device=device)


_LIBRARY.impl(
    "to_host", lambda x: x.clone(memory_format=torch.contiguous_format), "CPU"
)
_LIBRARY.impl("to_host", _to_host_on_cuda, "CUDA")
_LIBRARY.impl("to_device", _to_device, "CPU")  # by the tensor, which is on the host
torch.library.register_fake("budgetfit::to_host", _like_on_host, lib=_LIBRARY)
torch.library.register_fake("budgetfit::to_device", _like_on_device, lib=_LIBRARY)
