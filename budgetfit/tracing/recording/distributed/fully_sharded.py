"""What makes ``fully_shard`` run on fake tensors, and its memory known.

Sources: ``torch/distributed/fsdp/_fully_shard`` of torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import (
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fully_shard,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.tracing.recording.distributed.offloaded_log import OffloadedLog

if TYPE_CHECKING:
    from budgetfit.tracing.recording.distributed.rank_log import RankLog

# Where host and device are one, only ops of our own tell that a tensor is copied. A
# fragment, because several files define ops of this namespace.
_LIBRARY = torch.library.Library("budgetfit", "FRAGMENT")
for _name in ("shard_to_host", "shard_to_device"):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    torch.library.register_fake(f"budgetfit::{_name}", torch.empty_like, lib=_LIBRARY)
_POST_FORWARD_MESH = "_get_post_forward_mesh_info"
_REDUCE = "foreach_reduce"
_GLOBAL_SHAPES = "_propagate_tensor_meta_non_cached"


@contextlib.contextmanager
def fully_shard_on_fakes(log: RankLog) -> Iterator[None]:
    """Let ``fully_shard`` shard fake weights, and log what no op shows."""
    # The weights are in host memory until it moves them, block by block: the log,
    # paused by the caller, begins there.
    patches: list[tuple[Any, str, Any]] = [
        (torch.UntypedStorage, "resize_", _logged_resize(log)),
        (_fsdp_init, "_move_states_to_device", _logged_move(log)),
        (_fsdp_param_group, _REDUCE, _noted_reduction(log)),
        *_host_copies(log),
        # A mesh reads ranks out of tensors.
        (device_mesh, "init_device_mesh", _outside(device_mesh.init_device_mesh)),
        (DeviceMesh, "__init__", _outside(DeviceMesh.__init__)),
        (DeviceMesh, "_concatenate", staticmethod(_outside(DeviceMesh._concatenate))),
        (ShardingPropagator, _GLOBAL_SHAPES, _unlogged_shapes(log)),
    ]
    patches += [
        (module, _POST_FORWARD_MESH, _outside(getattr(module, _POST_FORWARD_MESH)))
        for module in (_fsdp_init, _fully_shard)
        if hasattr(module, _POST_FORWARD_MESH)
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        stack.enter_context(warnings.catch_warnings())
        # Of compiled blocks, whose outputs are views in a trace alone.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        yield


def _logged_resize(log: RankLog) -> Callable[..., Any]:
    """Log the resizing of storages: so unsharded weights are freed and allocated."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        log.log_resize(storage, size)
        return original(storage, size)

    return resize_


def _noted_reduction(log: RankLog) -> Callable[..., Any]:
    """Say where gradients have been reduced, and all that this took is freed."""
    original = getattr(_fsdp_param_group, _REDUCE)
    if isinstance(log, OffloadedLog):
        original = _copying("shard_to_host", original)

    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        reduced = original(*args, **kwargs)
        if log.on_reduced is not None:
            log.on_reduced()
        return reduced

    return foreach_reduce


def _host_copies(log: RankLog) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches for weights in host memory: each copy is an op of the trace."""
    if not isinstance(log, OffloadedLog):
        return
    kind, init = _fsdp_param.FSDPParam, "_init_sharded_param"
    yield kind, init, _copying("shard_to_host", getattr(kind, init))
    gathered: Any = vars(kind)["all_gather_inputs"]
    yield (
        *(kind, "all_gather_inputs"),
        property(_copying("shard_to_device", gathered.fget)),
    )


def _copying(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that copies tensors by an op where it moves them."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Moves(getattr(torch.ops.budgetfit, op)):
            return function(*args, **kwargs)

    return call


class _Moves(TorchFunctionMode):
    """Moves between the host and the device, which in a trace are one."""

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._copy = copy

    def __torch_function__(
        self,
        func: Any,
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        to_device = func is torch.Tensor.to and isinstance(args[1], torch.device)
        if to_device or func is torch.Tensor.cpu:
            return self._copy(args[0])
        return func(*args, **(kwargs or {}))


def _logged_move(log: RankLog) -> Callable[..., None]:
    """Log weights as they come from the host; here they are on the device already."""

    def move(
        params: list[torch.Tensor], buffers: list[torch.Tensor], _: torch.device
    ) -> None:
        log.paused = False
        for tensor in params:
            log.move(tensor, "parameters")
        for tensor in buffers:
            log.move(tensor, "buffers")

    return move


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs outside of all modes, on real tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _unlogged_shapes(log: RankLog) -> Callable[..., Any]:
    """Return the question for a result's global shape, asked with fakes of its own."""
    original = getattr(ShardingPropagator, _GLOBAL_SHAPES)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with log.pause():
            return original(*args, **kwargs)

    return call
