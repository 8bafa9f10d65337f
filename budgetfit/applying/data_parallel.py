"""Checks for DistributedDataParallel, FSDP and DataParallel wrappers."""

import sys
import warnings
from typing import Any, NamedTuple

from torch import nn

from budgetfit.applying.ranks import GroupRanks, started_processes
from budgetfit.core.parallelism import Parallelism
from budgetfit.errors import InputError

# By class names: importing the classes is slow.
_FSDP1 = "FullyShardedDataParallel"
_WRAPPERS = ("DistributedDataParallel", _FSDP1, "DataParallel")
_DDP = _WRAPPERS[0]
_SHARDED = "FSDPModule"  # base class that ``fully_shard`` adds to a module's class


class OwnDataParallel(NamedTuple):
    """A DDP wrapper that the user has put around the model of a plan for one GPU.

    Attributes:
        wrapper: DDP, by whose process group gradients are averaged.
    """

    wrapper: nn.Module
    ranks: GroupRanks


def refuse_planning_distributed(model: nn.Module) -> None:
    """Refuse DDP, DataParallel and FSDP models: a trace cannot run collectives."""
    refuse_wrapper(model, "plan")
    if _has(model, _SHARDED):
        raise InputError(
            "The model is sharded by fully_shard already, and a plan is made for one "
            "card that holds all of it. Leave fully_shard out while planning."
        )


def refuse_wrapped(model: nn.Module, parallelism: Parallelism | None) -> None:
    """Refuse a model to train that is wrapped or, where a plan shards it, sharded."""
    if parallelism is None:
        refuse_wrapper(model)
    elif _has(model, *_WRAPPERS, _SHARDED):
        raise InputError(
            f"The plan is for {parallelism.engine} on {parallelism.gpus} GPUs, and the "
            "model is wrapped or sharded already. Hand in the plain one on each rank: "
            "apply does the rest, as planned."
        )


def refuse_wrapper(model: nn.Module, verb: str = "apply") -> None:
    """Refuse a DDP, FSDP or DataParallel wrapper around the planned model."""
    refuse_replaced_parameters(model)
    name = type(model).__name__
    if name in _WRAPPERS:
        raise InputError(
            f"{name} is around the model. {verb.capitalize()} takes the plain one "
            f"(its .module); after apply wrap what the run calls: run.model = "
            f"{name}(run.model)."
        )


def refuse_replaced_parameters(model: nn.Module) -> None:
    """Refuse ``FullyShardedDataParallel`` around a model, or around parts of it."""
    if _has(model, _FSDP1):
        raise InputError(
            f"{_FSDP1} replaces a model's parameters by shards, which a plan for one "
            "GPU and its optimizer do not have. Hand in the plain model, and plan for "
            'as many GPUs, plan(..., gpus=N, engine="fsdp2"): apply then shards it.'
        )


def planned_classes(module: nn.Module) -> tuple[type, ...]:
    """Return a module's class and its bases, without those of ``fully_shard``."""
    # It derives a class, and transformers' layers give each class that is derived from
    # them a ``forward`` of its own.
    classes = type(module).__mro__
    added = [at for at, kind in enumerate(classes, 1) if kind.__name__ == _SHARDED]
    return classes[max(added, default=0) :]


def is_sharded_itself(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called for this module, alone or in a list."""
    return planned_classes(module) != type(module).__mro__


def warn_if_not_synchronized(model: nn.Module) -> None:
    """Warn if processes train a plan for one GPU apart, or the model is sharded."""
    if _has(model, _SHARDED):
        warnings.warn(
            "fully_shard has sharded the model, and the plan is for one GPU that holds "
            "all of it: the predicted memory and times do not hold. Plan for as many "
            "GPUs, plan(..., gpus=N), and hand in the plain model on each rank.",
            stacklevel=4,
        )
    processes = started_processes()
    if processes == 1 or _exchanges(model):
        return
    warnings.warn(
        f"{processes} processes train, and each of them a model of its own: run.model "
        "exchanges no gradients. Plan for them, plan(..., "
        f"gpus={processes}); or wrap what the run calls, after apply: run.model = "
        "torch.nn.parallel.DistributedDataParallel(run.model).",
        stacklevel=4,
    )


def find_own_data_parallel(
    model: nn.Module, known: OwnDataParallel | None
) -> OwnDataParallel | None:
    """Return the DDP wrapper in what a run calls, and its ranks; None without one.

    None also in ``wrapper.join()``: a rank that has run out of batches takes part in
    DDP's own exchanges only.

    ``known``: what was found before; kept if the wrapper is the same.
    """
    if started_processes() == 1:
        return None
    for module in model.modules():
        if not any(kind.__name__ == _DDP for kind in type(module).__mro__):
            continue
        wrapper: Any = module
        if wrapper._join_config.enable:
            return None
        if known is not None and module is known.wrapper:
            return known
        return OwnDataParallel(module, GroupRanks(wrapper.process_group))
    return None


def _exchanges(model: nn.Module) -> bool:
    if _has(model, *_WRAPPERS, _SHARDED, "DeepSpeedEngine"):
        return True
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and any(
        isinstance(parameter, tensors.DTensor) for parameter in model.parameters()
    )


def _has(model: nn.Module, *names: str) -> bool:
    return any(
        kind.__name__ in names
        for module in model.modules()
        for kind in type(module).__mro__
    )
