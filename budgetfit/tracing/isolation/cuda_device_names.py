"""Redirect explicit CUDA devices in a traced program to the CPU.

Fake CPU tensors stand for CUDA tensors in a trace. A forward or a loss that calls
``.to("cuda")``, makes a mask with ``device="cuda"`` or uses a CUDA tensor of its own
means the device of the model. No copy happens in training, and none in the trace. See
``docs/decisions/0028-programs-that-name-cuda.md``.
"""

import types
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.tracing.call_cache import CPU, Args, Kwargs

# The values of larger tensors are not copied, only their shape.
MAX_COPIED_ELEMENTS = 1 << 20
_TAKES_DEVICE_NAMES = frozenset({torch.Tensor.to})
_BACKWARD = frozenset(
    {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)


class CudaDevicesOnCpu(TorchFunctionMode):
    """Function mode that runs calls with CUDA devices or tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        # The tensor is kept: its id could be reused after it is freed.
        self._replacements: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types_: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run the call on the device of the fakes."""
        if type(func) is types.MethodWrapperType:  # an attribute access
            return func(*args, **kwargs or {})
        if func in _BACKWARD:
            return self._backward(func, args, kwargs or {})
        if func is torch.Tensor.cuda:
            return self.on_cpu(args[0]).to(CPU)  # which moves those of the host
        names = func in _TAKES_DEVICE_NAMES
        args = tuple([self._argument(value, names) for value in args])
        if not kwargs:
            return func(*args)
        return func(
            *args,
            **{
                key: self._argument(value, names or key == "device")
                for key, value in kwargs.items()
            },
        )

    def _backward(
        self, func: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> object:
        """Redirect in what autograd runs: in what a mode calls, the mode is off."""
        engine: Any = vars(torch.autograd)["_engine_run_backward"]

        def redirected(*args: object, **kwargs: object) -> object:
            with self:
                return engine(*args, **kwargs)

        with mock.patch.object(torch.autograd, "_engine_run_backward", redirected):
            return func(*args, **kwargs)

    def _argument(self, value: Any, names_device: bool) -> Any:
        kind = type(value)
        if kind is FakeTensor or isinstance(value, torch.Tensor):
            return self.on_cpu(value)
        if kind is torch.device:
            return CPU if value.type == "cuda" else value
        if kind is list or kind is tuple:
            return kind([self._argument(item, False) for item in value])
        if kind is torch.Generator:  # draws nothing in a trace
            return None if value.device.type == "cuda" else value
        if names_device and ((kind is str and value.startswith("cuda")) or kind is int):
            return CPU
        return value

    def on_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the CPU replacement of a CUDA tensor; other tensors as they are."""
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != "cuda":
            return tensor
        known = self._replacements.get(id(tensor))
        if known is None:
            made = (
                _fake_like(tensor)
                if isinstance(tensor, FakeTensor)
                else _values_of(tensor)
            )
            known = made.requires_grad_(tensor.requires_grad), tensor
            self._replacements[id(tensor)] = known
        return known[0]


def _fake_like(fake: FakeTensor) -> torch.Tensor:
    """Make an equal fake without logging it: the tensor existed before the step."""
    with _disable_current_modes(), fake.fake_mode:
        return torch.empty_strided(
            fake.shape, fake.stride(), dtype=fake.dtype, device="cpu"
        )


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a small tensor to the CPU; allocate others without values."""
    with _disable_current_modes():
        if tensor.numel() <= MAX_COPIED_ELEMENTS:
            return tensor.detach().cpu()
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
