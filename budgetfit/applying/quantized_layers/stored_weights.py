"""What bitsandbytes' quantised layers store, and which engines can train beside them.

Their scales are no parameters and no buffers: they belong to a weight, or to its layer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from budgetfit.applying.quantized_layers.int8_linear import Int8Linear
from budgetfit.applying.quantized_layers.nf4_linear import Nf4Linear
from budgetfit.core.parallelism import Parallelism
from budgetfit.errors import InputError


def has_quantized_weights(model: nn.Module) -> bool:
    """Whether bitsandbytes quantised some weights; also of a model to trace."""
    return any(
        isinstance(layer, (Nf4Linear, Int8Linear)) or _is_quantized(weight)
        for layer in model.modules()
        for weight in layer.parameters(recurse=False)
    )


def refuse_sharding(model: nn.Module, parallelism: Parallelism | None) -> None:
    """Refuse the engines that would shard quantised weights."""
    if parallelism is None or parallelism.engine == "ddp":
        return
    if has_quantized_weights(model):
        raise InputError(
            "A base that bitsandbytes has quantised is planned on several GPUs for "
            "DDP alone, where each rank holds all of it: fully_shard and DeepSpeed "
            'shard packed weights and not their scales. Use engine="ddp", or LoRA on '
            f'a base that is not quantised with engine="{parallelism.engine}".'
        )


def for_quantized(
    candidates: tuple[Parallelism, ...], model: nn.Module
) -> tuple[Parallelism, ...]:
    """Leave out those that would shard quantised weights, or refuse them all."""
    if not candidates or not has_quantized_weights(model):
        return candidates
    whole = tuple(each for each in candidates if each.engine == "ddp")
    if not whole:
        refuse_sharding(model, candidates[0])
    return whole


def scale_buffers(model: nn.Module) -> set[str]:
    """Return the buffers of layers to trace that are no buffers in bitsandbytes'."""
    return {
        f"{path}.{name}" if path else name
        for path, layer in model.named_modules()
        if isinstance(layer, (Nf4Linear, Int8Linear))
        for name, _ in layer.named_buffers(recurse=False)
    }


def stored_tensors(weight: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantised weight that its layer has not taken over."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return {"weight": weight, "SCB": weight.SCB}
    tensors = {"weight": weight, "absmax": state.absmax, "code": state.code}
    if state.nested:
        tensors["nested_absmax"] = state.state2.absmax
        tensors["nested_code"] = state.state2.code
        tensors["offset"] = state.offset
    return tensors


def quantized_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all of bitsandbytes' layers, with names."""
    for path, layer in model.named_modules():
        weight: Any = layer._parameters.get("weight")
        if not _is_quantized(weight):
            continue
        tensors = stored_tensors(weight)
        if tensors.get("SCB", weight) is None:  # the layer has it after a forward
            owner: Any = layer
            tensors["SCB"] = owner.state.SCB
        for name, tensor in tensors.items():
            if tensor is not None:  # 8-bit weights are quantised on a card
                yield f"{path}.{name}", tensor


def _is_quantized(weight: object) -> bool:
    return hasattr(weight, "bnb_quantized") or hasattr(weight, "CB")
