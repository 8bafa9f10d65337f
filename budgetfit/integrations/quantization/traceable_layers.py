"""Traceable replacements for bitsandbytes' layers, which refuse fake tensors."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from budgetfit.applying.meta_copy import copy_to_meta
from budgetfit.applying.precision import DTYPE_NAMES
from budgetfit.applying.quantized_layers.int8_linear import Int8Linear
from budgetfit.applying.quantized_layers.nf4_linear import Nf4Format, Nf4Linear
from budgetfit.core.adapter import Adapter
from budgetfit.integrations.quantization.quantize_linear import (
    library,
    meta_linear_4bit,
    meta_linear_8bit,
    requantized_every_step_error,
)


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has bitsandbytes layers; does not import bitsandbytes."""
    return any(_kind(module) is not None for module in model.modules())


def with_stored_quantization(adapter: Adapter, base: nn.Module) -> Adapter:
    """Return the adapter with the quantization that its base already has, if any."""
    for module in base.modules():
        kind = _kind(module)
        if kind == "Linear8bitLt":
            return replace(adapter, quantization="int8")
        if kind == "Linear4bit":
            packing = _packing(module)
            compute = packing.compute and DTYPE_NAMES.get(packing.compute)
            return replace(
                adapter,
                quantization="nf4",
                double_quantization=packing.nested,
                compute_dtype=compute or adapter.compute_dtype,
            )
    return adapter


def with_traceable_layers(model: nn.Module) -> nn.Module:
    """Return a meta copy whose quantized layers are replaced by traceable ones.

    Without bitsandbytes layers the model itself.

    Raises:
        InputError: If a layer's quantization has no traceable replacement.
        TraceError: If the model cannot be copied.
    """
    if not is_quantized(model):
        return model
    return copy_to_meta(model, replace=partial(_replaced, traceable=True))


def quantized_meta_copy(model: nn.Module) -> nn.Module:
    """Return a meta copy that keeps bitsandbytes' own layers."""
    return copy_to_meta(model, replace=partial(_replaced, traceable=False))


def _kind(module: nn.Module) -> str | None:
    """Return ``Linear4bit`` or ``Linear8bitLt`` for such a layer or a subclass."""
    for cls in type(module).__mro__:
        if cls.__name__ in ("Linear4bit", "Linear8bitLt") and (
            cls.__module__.startswith("bitsandbytes.")
        ):
            return cls.__name__
    return None


def _replaced(module: nn.Module, *, traceable: bool) -> nn.Module | None:
    """Return a traceable layer or bitsandbytes' own on meta; None for other modules."""
    layer: Any = module
    kind = _kind(layer)
    if kind is None:
        return None
    widths = layer.in_features, layer.out_features
    if kind == "Linear4bit" and traceable:
        new: nn.Module = Nf4Linear(*widths, _packing(layer), layer.bias)
    elif kind == "Linear4bit":
        new = meta_linear_4bit(library(), *widths, _packing(layer))
    elif traceable:
        new = Int8Linear(*widths, _threshold(layer), layer.bias)
    else:
        new = meta_linear_8bit(library(), *widths, _threshold(layer))
    new.bias = layer.bias
    return new.train(layer.training)


def _threshold(layer: Any) -> float:
    if layer.state.has_fp16_weights:
        raise requantized_every_step_error()
    return layer.state.threshold


def _packing(layer: Any) -> Nf4Format:
    weight = layer.weight
    state = weight.quant_state
    compute = layer.compute_dtype
    if state is None:  # not quantized until it is moved to a device
        return Nf4Format(
            nested=weight.compress_statistics,
            block=weight.blocksize,
            storage=weight.quant_storage,
            weight=weight.dtype,
            compute=compute,
        )
    return Nf4Format(
        nested=state.nested,
        block=state.blocksize,
        storage=weight.dtype,
        weight=state.dtype,
        compute=compute,
    )
