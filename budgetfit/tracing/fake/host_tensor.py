"""Fakes of tensors that stay in host memory when a model is moved to the GPU.

``Module.to`` moves parameters and buffers. A tensor in a plain attribute, or in a list
or dictionary there, stays, and the forward moves it: for each use, or once and for
good. Fakes of both are on the CPU, where ``to`` of the one to the device of the other
would do nothing, so that the copy was not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map_only

from budgetfit.tracing.call_cache import Args, Kwargs

_MOVES: Final = frozenset({torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type_as})
_MAY_HOLD: Final = (torch.Tensor, list, tuple, dict)
_OF_ALL_MODULES: Final = frozenset(vars(nn.Module()))  # parameters, buffers, hooks
_ELSEWHERE: Final = torch.device("cuda")  # it differs from that of all other fakes


class HostTensor(FakeTensor):
    """A fake in host memory, among fakes that stand for CUDA tensors.

    Moved to the device of another one, it is copied. Its views are in host memory too;
    what other ops make of it counts as on the GPU.
    """

    @property  # type: ignore[misc]
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that a program is told: another than that of all other fakes."""
        if torch._C._is_torch_function_enabled():
            return _ELSEWHERE
        return super().device

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Run a function of torch on plain fakes of the same storage."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            first = args[0] if args else None
            plain = tree_map_only(cls, torch.Tensor.detach, (args, kwargs))
            out = func(*plain[0], **plain[1])
            if isinstance(first, cls) and _shares(out, first):
                if func in _MOVES and _names_device(func, args[1:], kwargs):
                    return out.clone()
                if _only(first, args, kwargs):
                    return as_host_tensor(out)
            return out


def as_host_tensor(fake: torch.Tensor) -> torch.Tensor:
    """Make a fake one in host memory; a tensor with one number moves by itself."""
    if type(fake) is FakeTensor and fake.dim() and not fake.requires_grad:
        fake.__class__ = HostTensor
    return fake


def count_as_on_gpu(model: nn.Module) -> None:
    """Make those of a model's modules plain: code that is compiled reads them."""
    for module in model.modules():
        for tensor in list[FakeTensor](host_tensors(module)):
            tensor.__class__ = FakeTensor


def moves_attributes(module: nn.Module) -> bool:
    """Whether a module has a rule of its own for what ``Module.to`` moves."""
    return type(module)._apply is not nn.Module._apply


def host_tensors(module: nn.Module) -> Iterator[HostTensor]:
    """Yield those in attributes of a fake module, or in containers there."""
    for name, value in vars(module).items():
        if name in _OF_ALL_MODULES or not isinstance(value, _MAY_HOLD):
            continue
        for leaf in tree_iter(value):
            if type(leaf) is HostTensor:
                yield leaf


def _shares(out: object, host: torch.Tensor) -> bool:
    return (
        type(out) is FakeTensor
        and out.untyped_storage()._cdata == host.untyped_storage()._cdata
    )


def _names_device(func: Callable[..., object], args: Args, kwargs: Kwargs) -> bool:
    if func is not torch.Tensor.to:
        return True
    given = (*args, *kwargs.values())
    return any(isinstance(x, (torch.device, str, int, torch.Tensor)) for x in given)


def _only(first: torch.Tensor, args: Args, kwargs: Kwargs) -> bool:
    """Whether no other tensor goes in, as in a view."""
    leaves = tree_iter((args, kwargs))
    return all(x is first for x in leaves if isinstance(x, torch.Tensor))
