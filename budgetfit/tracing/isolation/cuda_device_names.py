"""One device in a trace: what a program puts on CUDA by name is where its weights are.

Fakes stand for CUDA tensors and are on the CPU (tracing T2). A forward or a loss that
says ``.to("cuda")``, makes a mask with ``device="cuda"`` or multiplies with a tensor of
its own that is on the card means the device that the model is on. Nothing is moved for
it in training, and so nothing is here.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.tracing.op_signature import CPU

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Values that a program may look at; of larger tensors only the shape counts.
MOST_VALUES = 1 << 20
_TAKES_DEVICE_NAMES = frozenset({torch.Tensor.to})


class OneDevice(TorchFunctionMode):
    """Has every call that names CUDA, or is given a tensor there, run on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        # The tensor is kept: the id of one that died could be another's.
        self._stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types_: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the call returns
        """Run the call where the fakes are."""
        if type(func) is types.MethodWrapperType:  # an attribute: nothing is computed
            return func(*args, **kwargs or {})
        if func is torch.Tensor.cuda:
            return self.here(args[0])
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

    def _argument(self, value: Any, names_device: bool) -> Any:  # noqa: ANN401
        kind = type(value)
        if kind is FakeTensor or isinstance(value, torch.Tensor):
            return self.here(value)
        if kind is torch.device:
            return CPU if value.type == "cuda" else value
        if kind is list or kind is tuple:
            return kind([self._argument(item, False) for item in value])
        if kind is torch.Generator:  # draws nothing in a trace, and stays as it is
            return None if value.device.type == "cuda" else value
        if names_device and ((kind is str and value.startswith("cuda")) or kind is int):
            return CPU
        return value

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor on CUDA; any other is itself."""
        where = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if where.type != "cuda":
            return tensor
        known = self._stand_ins.get(id(tensor))
        if known is None:
            made = (
                _fake_like(tensor)
                if isinstance(tensor, FakeTensor)
                else _values_of(tensor)
            )
            known = made.requires_grad_(tensor.requires_grad), tensor
            self._stand_ins[id(tensor)] = known
        return known[0]


def _fake_like(fake: FakeTensor) -> torch.Tensor:
    """Make it out of a log's sight: the tensor was there before the step."""
    with _disable_current_modes(), fake.fake_mode:
        return torch.empty_strided(
            fake.shape, fake.stride(), dtype=fake.dtype, device="cpu"
        )


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the CPU what is small; memory of the rest is never touched."""
    with _disable_current_modes():
        if tensor.numel() <= MOST_VALUES:
            return tensor.detach().cpu()
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
        )
