"""bitsandbytes: what stands for the quantised layers of a model in traces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.applying.meta_copy import weightless_copy
from budgetfit.applying.quantized_layers.int8_linear import Int8Linear
from budgetfit.applying.quantized_layers.nf4_linear import PackedLinear, Packing
from budgetfit.integrations.quantization.bitsandbytes_layers import (
    DTYPES,
    eight_bits_on_meta,
    four_bits_on_meta,
    library,
    quantised_in_every_step,
)

if TYPE_CHECKING:
    from budgetfit.core.adapter import Adapter


def is_quantised(model: nn.Module) -> bool:
    """Whether a model has layers of bitsandbytes; it is not imported to tell."""
    return any(_kind(module) is not None for module in model.modules())


def as_stored(adapter: Adapter, base: nn.Module) -> Adapter:
    """Return the adapter with the quantisation that its base has already, if any."""
    for module in base.modules():
        kind = _kind(module)
        if kind == "Linear8bitLt":
            return replace(adapter, quantization="int8")
        if kind == "Linear4bit":
            packing = _packing(module)
            names = {dtype: name for name, dtype in DTYPES.items()}
            compute = None if packing.compute is None else names.get(packing.compute)
            return replace(
                adapter,
                quantization="nf4",
                double_quantization=packing.nested,
                compute_dtype=compute or adapter.compute_dtype,
            )
    return adapter


def with_stand_ins(model: nn.Module) -> nn.Module:
    """Return a copy without weights whose quantised layers can be traced.

    Args:
        model: Not changed. One without layers of bitsandbytes comes back itself.

    Raises:
        InputError: If a layer is quantised in a way that has no stand-in.
        TraceError: If the model cannot be copied.
    """
    return weightless_copy(model, replace=_stand_in) if is_quantised(model) else model


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy without weights whose quantised layers are still the library's.

    Raises:
        InputError, TraceError: As ``with_stand_ins``.
    """
    return weightless_copy(model, replace=_without_values)


def loading_peak_bytes(model: nn.Module) -> int | None:
    """Return the most that loading a model with stand-ins has on the card.

    Weights are quantised one after the other: at most all of the model, and the
    largest in its own dtype, with the scales that double quantisation starts from.

    Returns:
        None where nothing is quantised.
    """
    passing = [0]
    for module in model.modules():
        if isinstance(module, PackedLinear):
            count = module.in_features * module.out_features
            scales = 2 * 4 * -(-count // module.packing.block)  # fp32, less their mean
            passing.append(
                count * module.packing.weight.itemsize
                + (scales if module.packing.nested else 0)
            )
        elif isinstance(module, Int8Linear):
            passing.append(module.weight.numel() * torch.float16.itemsize)
    if len(passing) == 1:
        return None
    tensors = (*model.parameters(), *model.buffers())
    return max(passing) + sum(tensor.nbytes for tensor in tensors)


def stored_bytes(weight: Any) -> dict[str, int]:  # noqa: ANN401 - Params4bit, Int8Params
    """Return the bytes of each tensor that a real quantised weight consists of."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        tensors = {"weight": weight, "absmax": state.absmax, "code": state.code}
        if state.nested:
            tensors["nested_absmax"] = state.state2.absmax
            tensors["nested_code"] = state.state2.code
            tensors["offset"] = state.offset
    else:
        tensors = {"weight": weight, "SCB": weight.SCB}
    return {name: value.untyped_storage().nbytes() for name, value in tensors.items()}


def _kind(module: nn.Module) -> str | None:
    """Return ``Linear4bit`` or ``Linear8bitLt`` for such a layer or a child of it."""
    for cls in type(module).__mro__:
        if cls.__name__ in ("Linear4bit", "Linear8bitLt") and (
            cls.__module__.startswith("bitsandbytes.")
        ):
            return cls.__name__
    return None


def _stand_in(module: nn.Module) -> nn.Module | None:
    kind, layer = _kind(module), _any(module)
    if kind is None:
        return None
    widths = layer.in_features, layer.out_features
    if kind == "Linear4bit":
        new: nn.Module = PackedLinear(*widths, _packing(layer), layer.bias)
    else:
        new = Int8Linear(*widths, _threshold(layer), layer.bias)
    return new.train(layer.training)


def _without_values(module: nn.Module) -> nn.Module | None:
    kind, layer = _kind(module), _any(module)
    if kind is None:
        return None
    widths = layer.in_features, layer.out_features
    if kind == "Linear4bit":
        new = four_bits_on_meta(library(), *widths, _packing(layer))
    else:
        new = eight_bits_on_meta(library(), *widths, _threshold(layer))
    new.bias = layer.bias
    return new.train(layer.training)


def _any(module: nn.Module) -> Any:  # noqa: ANN401 - a layer, whose class is optional
    return module


def _threshold(layer: Any) -> float:  # noqa: ANN401 - a Linear8bitLt
    if layer.state.has_fp16_weights:
        raise quantised_in_every_step()
    return layer.state.threshold


def _packing(layer: Any) -> Packing:  # noqa: ANN401 - a Linear4bit
    weight = layer.weight
    state = weight.quant_state
    compute = layer.compute_dtype
    if state is None:  # not quantised yet: it will be when it moves to a device
        return Packing(
            nested=weight.compress_statistics,
            block=weight.blocksize,
            storage=weight.quant_storage,
            weight=weight.dtype,
            compute=compute,
        )
    return Packing(
        nested=state.nested,
        block=state.blocksize,
        storage=weight.dtype,
        weight=state.dtype,
        compute=compute,
    )
