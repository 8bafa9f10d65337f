"""Two ops that copy between the device and pinned host memory, beside the kernels.

They are ops, and no plain calls of ``copy_``, so that a trace sees by their names what
takes no device memory and what goes over the bus: ``core.step_trace.TO_HOST`` and
``TO_DEVICE``. On a CPU they are clones, which is how all that uses them is tested.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

# Kept for as long as the process: its end would take the ops away.
# A fragment: several files define ops of this namespace.
_LIBRARY = torch.library.Library("budgetfit", "FRAGMENT")
_LIBRARY.define("to_host(Tensor x) -> Tensor")
_LIBRARY.define("to_device(Tensor host, Device device) -> Tensor")


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x`` in host memory, made as soon as ``x`` is computed.

    On CUDA the copy runs beside the kernels: ``x`` must not be freed or written to
    before the stream in use waits for it (``wait_for_copies``).
    """
    copy: torch.Tensor = torch.ops.budgetfit.to_host.default(x)
    return copy


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of ``host`` in memory of the stream in use.

    On CUDA it must not be read or freed before the stream that is in use waits for the
    copy (``copies_so_far``).
    """
    copy: torch.Tensor = torch.ops.budgetfit.to_device.default(host, device)
    return copy


class Copies(NamedTuple):
    """The copies that were asked for up to one moment, and who is to wait for them."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream

    def wait(self) -> None:
        """Let the stream that was in use go on only after these copies."""
        self.stream.wait_event(self.event)


def copies_so_far(device: torch.device) -> Copies | None:
    """Return what to wait for before using what was copied; None where all is done."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return Copies(_copy_stream(device).record_event(), stream)


def wait_for_copies(device: torch.device) -> None:
    """Let the stream in use go on only after all copies that were asked for so far."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_copy_stream(device))


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=device)


def _to_host_on_cpu(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _to_host_on_cuda(x: torch.Tensor) -> torch.Tensor:
    # Torch's own allocator of pinned memory keeps what is freed for the next step and
    # hands it out only after the copies into and out of it are done, so there is no
    # pool here. It rounds up to powers of two: host memory, not the device's.
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    stream = _copy_stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
    return host


def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    # The kernels' stream owns the memory: were it the copying stream's, it could not
    # be used for anything else afterwards (a pool per stream).
    copy = torch.empty(host.shape, dtype=host.dtype, device=device)
    if device.type != "cuda":
        return copy.copy_(host)
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(host, non_blocking=True)
    return copy


def _like_on_host(x: torch.Tensor) -> torch.Tensor:
    # A trace's tensors are all on the CPU and stand for the device's.
    return torch.empty(x.shape, dtype=x.dtype, device=_host_of(x))


def _host_of(x: torch.Tensor) -> torch.device:
    return x.device if x.device.type == "meta" else torch.device("cpu")


def _like_on_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(host.shape, dtype=host.dtype, device=device)


_LIBRARY.impl("to_host", _to_host_on_cpu, "CPU")
_LIBRARY.impl("to_host", _to_host_on_cuda, "CUDA")
_LIBRARY.impl("to_device", _to_device, "CPU")  # by the tensor, which is on the host
torch.library.register_fake("budgetfit::to_host", _like_on_host, lib=_LIBRARY)
torch.library.register_fake("budgetfit::to_device", _like_on_device, lib=_LIBRARY)
