"""Wrap a model for several GPUs with PyTorch's ``fully_shard`` or DDP.

A trace runs this on fake tensors, and training on real ones.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from budgetfit.applying.quantized_layers.stored_weights import scale_buffers
from budgetfit.core.parallelism import Parallelism
from budgetfit.errors import InputError
from budgetfit.utils.lazy_import import lazy_import

POLICY_DTYPES = {
    None: None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def for_batch_norms(
    candidates: tuple[Parallelism, ...], model: nn.Module
) -> tuple[Parallelism, ...]:
    """Return them with weights gathered as they are, where batch norms train."""
    # ``fully_shard`` in 16 bits would gather their weights so, and their statistics
    # stay in fp32, which the backward pass of ``batch_norm`` does not take together.
    # Autocast does.
    if not _trains_batch_norms(model):
        return candidates
    return tuple(
        replace(each, reduce_dtype="fp32") if each.engine == "fsdp2" else each
        for each in candidates
    )


def _trains_batch_norms(model: nn.Module) -> bool:
    return any(
        isinstance(module, torch.nn.modules.batchnorm._NormBase)
        and module.training == model.training  # else frozen on purpose
        and module.affine
        and module.running_mean is not None
        for module in model.modules()
    )


def wrap(
    model: nn.Module,
    blocks: Iterable[str],
    parallelism: Parallelism,
    device: torch.device,
) -> nn.Module:
    """Shard or wrap a model, whose blocks are checkpointed already.

    ``fully_shard`` changes the model in place and moves it to the device block by
    block, so it may come from the CPU: then no rank ever holds all of it. DDP takes a
    model on the device.

    ``blocks``: module paths that are sharded and gathered each for itself. All ranks
    have the same weights. Returns the module to call: the model, or DDP around it.

    Raises:
        InputError: If batch norms would get 16-bit weights beside fp32 statistics, or
            parameters that ``fully_shard`` replaces have hooks.
    """
    if parallelism.param_dtype in {"bf16", "fp16"} and _trains_batch_norms(model):
        raise InputError(
            f"Batch norms cannot train with weights that fully_shard gathers in "
            f"{parallelism.param_dtype}: their statistics stay in fp32. Use "
            'param_dtype=None, for autocast, or engine="ddp".'
        )
    if parallelism.engine == "ddp":
        if scales := scale_buffers(model):  # DDP is neither to send nor to check them
            name = "_ddp_params_and_buffers_to_ignore"
            setattr(model, name, scales | set(getattr(model, name, ())))
        return torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=parallelism.bucket_cap_mb,
            gradient_as_bucket_view=parallelism.gradient_as_bucket_view,
        )
    refuse_hooks(model)
    attributes = _own_attributes(model)
    fsdp = lazy_import("torch.distributed.fsdp")
    settings: dict[str, Any] = {
        "mesh": device_mesh(parallelism, device.type),
        "mp_policy": fsdp.MixedPrecisionPolicy(
            param_dtype=POLICY_DTYPES[parallelism.param_dtype],
            reduce_dtype=POLICY_DTYPES[parallelism.reduce_dtype],
        ),
    }
    if parallelism.cpu_offload:
        # Only memory of a machine with a GPU can be pinned.
        pinned = device.type == "cuda"
        settings["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=pinned)
    reshard = parallelism.reshard_after_forward
    for name in blocks:
        modules = _with_forward(model.get_submodule(name))
        if modules:  # else parameters alone, which are gathered with the rest
            group: Any = modules[0] if len(modules) == 1 else modules
            fsdp.fully_shard(group, reshard_after_forward=reshard, **settings)
    wrapped: nn.Module = fsdp.fully_shard(model, **settings)
    for name, parameter in wrapped.named_parameters():
        vars(parameter).update(attributes.get(name, {}))
    return wrapped


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """Return the module, or those in a list of modules, which run one by one."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [each for child in module.children() for each in _with_forward(child)]


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks of parameters that ``fully_shard`` replaces, or has replaced.

    It runs none that were registered before, and of its own parameters those alone
    that wait for the reduced gradient.

    Raises:
        InputError: If there are some; names the parameters.
    """
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks
        or (
            parameter._post_accumulate_grad_hooks and not isinstance(parameter, DTensor)
        )
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InputError(
            f"{names[0]}{more} has hooks for its gradient, which would never run: "
            "fully_shard replaces parameters by shards. Register them after apply, by "
            "register_post_accumulate_grad_hook, for each rank's shard of the reduced "
            'gradient; or use engine="ddp".'
        )


def _own_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what others have set on parameters, such as ``no_weight_decay``."""
    return {
        name: dict(vars(parameter))
        for name, parameter in model.named_parameters()
        if type(parameter) is nn.Parameter
    }


def device_mesh(parallelism: Parallelism, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks; two-dimensional for HSDP."""
    copies, gpus = parallelism.replicate, parallelism.gpus
    shape = (copies, gpus // copies) if parallelism.shard else (gpus,)
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    return lazy_import("torch.distributed.device_mesh").init_device_mesh(
        device_type, shape, mesh_dim_names=names
    )


def gradient_sync(
    wrapped: nn.Module, parallelism: Parallelism | None, *, is_last: bool
) -> AbstractContextManager[object]:
    """Return the context of a micro-batch's forward and backward.

    ``is_last``: whether the micro-batch is the last one of an update.

    Raises:
        InputError: If DeepSpeed's engine has gradients that were dropped.
    """
    if parallelism is None:
        return nullcontext()
    reduces = is_last or parallelism.sync_each_batch
    module: Any = wrapped
    if parallelism.engine == "deepspeed":
        if getattr(module, "has_dropped", False):
            raise InputError(
                "A step failed or was dropped in the middle, and DeepSpeed's engine "
                "keeps gradients of it. Apply the plan to a new model, and load its "
                "last checkpoint: run.engine.load_checkpoint(folder)."
            )
        module.set_gradient_accumulation_boundary(is_last)
        return nullcontext()
    if parallelism.engine == "fsdp2":
        module.set_requires_gradient_sync(reduces)
        return nullcontext()
    return nullcontext() if reduces else module.no_sync()
