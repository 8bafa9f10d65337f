"""Attribute storages to layers: weights, optimizer state, and what an optimizer makes.

No module runs in an optimizer, so there ops tell: what an op makes belongs to the layer
of what it was made from; of lists of tensors, each entry to its own. A first step makes
optimizer state out of nothing and learns only at its end whose that is, so sources are
noted first (``StorageLog.made_from``) and followed to layers later.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from budgetfit.tracing.recording.module_tracker import BlockTracker
    from budgetfit.tracing.recording.raw_trace import Runner
    from budgetfit.tracing.recording.storage_log import StorageLog
    from budgetfit.tracing.records import OpRow

# What torch's optimizers count with, one number for each parameter: on the CPU unless
# they are fused or capturable. ASGD alone keeps its count beside the parameter.
_COUNTERS = ("step", "mu_product")


def _layers_of(model: nn.Module, tracker: BlockTracker) -> dict[nn.Module, int]:
    """Return each module's layer; those that a forward put in have their parent's."""
    index = {name: layer for layer, name in enumerate(tracker.layers)}
    layers: dict[nn.Module, int] = {}
    for name, module in model.named_modules():
        while name not in index:
            name = name.rpartition(".")[0]  # noqa: PLW2901 - up to the model itself
        layers[module] = index[name]
    return layers


def register(
    model: nn.Module, log: StorageLog, tracker: BlockTracker | None = None
) -> None:
    """Weights come first, in the order in which ``model.to("cuda")`` moves them (B4).

    That is children before their parents, and parameters before buffers of a module
    (``nn.Module._apply``).
    """
    layers = (
        _layers_of(model, tracker)
        if tracker is not None
        else dict.fromkeys(model.modules(), -1)
    )

    def name(module: nn.Module) -> None:
        for child in module.children():
            name(child)
        for parameter in module._parameters.values():
            if parameter is not None:
                log.name(parameter, "parameters", layers[module])
        for buffer in module._buffers.values():
            if buffer is not None:
                log.name(buffer, "buffers", layers[module])

    name(model)


def name_survivors(
    model: nn.Module, runner: Runner, log: StorageLog, tracker: BlockTracker
) -> None:
    """Say what outlived the step: optimizer state, and whose it is."""
    layers = {
        parameter: layer
        for module, layer in _layers_of(model, tracker).items()
        for parameter in module._parameters.values()
        if parameter is not None
    }
    owners: dict[int, int] = {}
    for group in runner.optimizer.param_groups:
        on_card = (
            group.get("fused")
            or group.get("capturable")
            or isinstance(runner.optimizer, torch.optim.ASGD)
        )
        for parameter in group["params"]:
            state = runner.optimizer.state.get(parameter, {})
            for value in tree_leaves(state):
                if isinstance(value, torch.Tensor):
                    layer = layers.get(parameter, -1)
                    log.name(value, "optimizer_state", layer)
                    index = log.index_of(value)
                    if owners.setdefault(index, layer) != layer:
                        log.made_from[index] = ()  # a table that all share: no one's
            counters = () if on_card else _COUNTERS
            for value in map(state.get, counters):
                if isinstance(value, torch.Tensor):
                    log.ignore(value)  # counted in host memory (cuda-memory M43)


def storage_owners(log: StorageLog) -> list[int]:
    """Return the layer that each storage belongs to, or -1."""
    owners = list(log.layers)
    for storage in sorted(log.made_from):  # what it was made from came before
        owners[storage] = only(owners[source] for source in log.made_from[storage])
    return owners


def op_shares(op: OpRow, owners: list[int]) -> dict[int, int]:
    """Return the bytes that an op moved of each layer's storages."""
    shares: dict[int, int] = defaultdict(int)
    for storages, moved_bytes in op.touched:
        owner = only(owners[storage] for storage in storages)
        if owner >= 0:
            shares[owner] += moved_bytes
    return shares


def only(owners: Iterable[int]) -> int:
    """Return the one layer among ``owners``, or -1 where there are several or none."""
    found = set(owners) - {-1}
    return found.pop() if len(found) == 1 else -1
