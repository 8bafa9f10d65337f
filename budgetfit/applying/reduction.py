"""What DDP, ``fully_shard`` and DeepSpeed leave to a loop: losses, groups, errors."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def sum_over_ranks(tensor: torch.Tensor, wrapped: nn.Module) -> torch.Tensor:
    """Sum a tensor over all ranks, in place; the host does not wait for it."""
    # By the process groups that the gradients take: another one would have buffers of
    # its own on the GPU.
    for group in _groups(wrapped):
        distributed.all_reduce(tensor, group=group)
    return tensor


def reduce_accumulated(wrapped: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Reduce gradients that were accumulated without; ``wrapped``: sharded, or DDP."""
    if _is_sharded(wrapped):
        module: Any = wrapped
        module.set_requires_gradient_sync(True)
        # What fully_shard queues for the end of a backward: it reduces the gradients of
        # each group that this backward has not reached.
        module._get_fsdp_state()._root_post_backward_final_callback()
        return
    for parameter in trained:
        if parameter.grad is not None:
            parameter.grad.div_(distributed.get_world_size())
            distributed.all_reduce(parameter.grad)


def drop_accumulated(wrapped: nn.Module) -> None:
    """Drop gradients that were accumulated without reduction, and an aborted step."""
    # DeepSpeed has no way to: its engine takes no further step (``gradient_sync``).
    module: Any = wrapped
    if is_engine(wrapped):
        module.has_dropped = True
        return
    if not _is_sharded(wrapped):
        return
    root = module._get_fsdp_state()
    if not root._is_root:  # before the first forward
        return
    reset = getattr(module, "reset_iter_state", None)  # from torch 2.13 on
    if reset is not None:
        reset()
    for parameter in _sharded_parameters(module):
        # 2.13's reset keeps them.
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def have_gradients(wrapped: nn.Module) -> dict[str, bool]:
    """Return whether trainable parameters have a gradient, reduced or not, by name."""
    module: Any = wrapped
    not_reduced = set()
    if _is_sharded(wrapped):
        not_reduced = {
            each.sharded_param
            for each in _sharded_parameters(module)
            if each.unsharded_accumulated_grad is not None
            or getattr(each, "_unsharded_param", each.sharded_param).grad is not None
        }
    else:
        module = wrapped.module
    return {
        name: parameter.grad is not None or parameter in not_reduced
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def to_shards(wrapped: nn.Module) -> None:
    """Register the sharded weights again, after an evaluation without a backward."""
    # Until a backward the outermost module keeps its gathered weights, and so does each
    # block whose weights are kept after the forward.
    if _is_sharded(wrapped):
        module: Any
        for module in filter(_is_sharded, wrapped.modules()):
            module.reshard()


def warn_if_stays_sharded(wrapped: nn.Module) -> None:
    """Warn that there is no way back from ``fully_shard`` and DeepSpeed."""
    if is_engine(wrapped):
        warnings.warn(
            "The model stays with DeepSpeed's engine, which is not undone. For a "
            "plain model save its weights, run.engine.save_16bit_model(folder), and "
            "load them into a new one.",
            stacklevel=3,
        )
    if _is_sharded(wrapped):
        warnings.warn(
            f"The model stays sharded over {distributed.get_world_size()} ranks: "
            "PyTorch does not undo fully_shard. For a plain model load its weights "
            "into a new one: torch.distributed.checkpoint.state_dict."
            "get_model_state_dict(run.model, "
            "options=StateDictOptions(full_state_dict=True)).",
            stacklevel=3,
        )


def is_engine(wrapped: nn.Module) -> bool:
    """Whether it is DeepSpeed's engine."""
    return hasattr(wrapped, "zero_optimization_stage")


def _sharded_parameters(root: Any) -> Iterator[Any]:
    """Yield what ``fully_shard`` keeps of each parameter, after the first forward."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.13
            groups = filter(None, [state._fsdp_param_group])
        for group in groups:
            yield from group.fsdp_params


def _is_sharded(wrapped: nn.Module) -> bool:
    return hasattr(wrapped, "set_requires_gradient_sync")


def _groups(wrapped: nn.Module) -> list[Any]:
    """Return the process groups that together join all ranks; None: the default one."""
    # Of a user's own DDP that may be a group of some of the processes.
    if isinstance(wrapped, DistributedDataParallel):
        return [wrapped.process_group]
    if not _is_sharded(wrapped):
        return [None]
    weight: Any = next(wrapped.parameters())
    return weight.device_mesh.get_all_groups()
