"""Attribute storages to layers: weights, optimizer state, tensors in the optimizer.

No module runs in an optimizer, so an op's outputs belong to the layer of its inputs; in
tensor lists (``_foreach``), each output to that of the inputs at its position. The
owner of optimizer state is known only after the first step, so sources are noted first
(``StorageLog.made_from``) and resolved later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from budgetfit.tracing.recording.module_tracker import ModuleTracker

if TYPE_CHECKING:
    from budgetfit.tracing.recording.storage_log import StorageLog
    from budgetfit.tracing.records import OpRecord

# Scalar state per parameter in torch's optimizers: on the CPU unless fused or
# capturable. Only ASGD has it on the parameter's device.
_HOST_STATE = ("step", "mu_product")


def _layers_of(model: nn.Module, tracker: ModuleTracker) -> dict[nn.Module, int]:
    """Return each module's layer; modules added by a forward have their parent's."""
    index = {name: layer for layer, name in enumerate(tracker.layers)}
    layers: dict[nn.Module, int] = {}
    for name, module in model.named_modules():
        while name not in index:
            name = name.rpartition(".")[0]  # noqa: PLW2901 - up to the model itself
        layers[module] = index[name]
    return layers


def log_weights(
    model: nn.Module, log: StorageLog, tracker: ModuleTracker | None = None
) -> None:
    """Log parameters and buffers in the order in which ``model.to`` moves them."""
    # That is children before parents, and a module's parameters before its buffers
    # (``nn.Module._apply``).
    layers = (
        _layers_of(model, tracker)
        if tracker is not None
        else dict.fromkeys(model.modules(), -1)
    )

    def log_module(module: nn.Module) -> None:
        for child in module.children():
            log_module(child)
        for parameter in module._parameters.values():
            if parameter is not None:
                log.assign(parameter, "parameters", layers[module])
        for buffer in module._buffers.values():
            if buffer is not None:
                log.assign(buffer, "buffers", layers[module])

    log_module(model)


def log_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    log: StorageLog,
    tracker: ModuleTracker,
) -> None:
    """Log optimizer state, and the layers that own it, after a step."""
    # ``optimizer.master_weights``, where it has any, are copies of weights of its own.
    masters = getattr(optimizer, "master_weights", ())
    for weights in masters:
        log.set_category(weights, "optimizer_state")
    layers = {
        parameter: layer
        for module, layer in _layers_of(model, tracker).items()
        for parameter in module._parameters.values()
        if parameter is not None
    }
    owners: dict[int, int] = {}
    for group in optimizer.param_groups:
        in_host_memory = log.is_of_cuda and not (
            group.get("fused")
            or group.get("capturable")
            or isinstance(optimizer, torch.optim.ASGD)
        )
        for parameter in (*group["params"], *masters):
            state = optimizer.state.get(parameter, {})
            for value in tree_leaves(state):
                if isinstance(value, torch.Tensor):
                    layer = layers.get(parameter, -1)
                    log.assign(value, "optimizer_state", layer)
                    index = log.index_of(value)
                    if owners.setdefault(index, layer) != layer:
                        log.made_from[index] = ()  # shared by layers: has no owner
            for value in map(state.get, _HOST_STATE if in_host_memory else ()):
                if isinstance(value, torch.Tensor):
                    log.exclude_host_storage(value)


def storage_owners(log: StorageLog) -> list[int]:
    """Return the layer that each storage belongs to, or -1."""
    owners = list(log.layers)
    for storage in sorted(log.made_from):  # its sources have smaller indices
        owners[storage] = single_owner(
            owners[source] for source in log.made_from[storage]
        )
    return owners


def bytes_by_layer(op: OpRecord, owners: list[int]) -> dict[int, int]:
    """Return the bytes that an op moved, by the layer that owns the storages."""
    shares: dict[int, int] = defaultdict(int)
    for storages, moved_bytes in op.touched:
        owner = single_owner(owners[storage] for storage in storages)
        if owner >= 0:
            shares[owner] += moved_bytes
    return shares


def single_owner(owners: Iterable[int]) -> int:
    """Return the only layer among ``owners``; -1 if there are several or none."""
    found = set(owners) - {-1}
    return found.pop() if len(found) == 1 else -1
