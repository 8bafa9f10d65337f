"""bitsandbytes: quantised linear layers made, and stand-ins for those of a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.applying.int8_linear import Int8Linear
from budgetfit.applying.packed_linear import PackedLinear, Packing, packed_tensors
from budgetfit.applying.weightless_copy import weightless_copy
from budgetfit.core.adapter import INT8_THRESHOLD, Adapter
from budgetfit.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def quantise(
    model: nn.Module, adapter: Adapter, device: torch.device | str | None = None
) -> None:
    """Put quantised layers in the place of linear ones, as transformers does.

    That is all but the output layer and what is tied to it; bitsandbytes' own classes.

    Args:
        model: Changed in place. On meta its layers get the quantised layout; with
            weights these are quantised.
        adapter: Says how.
        device: Where quantised weights go; None: where they are.

    Raises:
        InputError: If bitsandbytes is not installed, or there is no layer to quantise.
    """
    bnb = _library()
    found = list(_linear_layers(model))
    for name, layer in found:
        weight = layer.weight.data
        if not isinstance(layer, nn.Linear):  # GPT-2's Conv1D: transposed
            weight = weight.t().contiguous()
        make = _four_bits if adapter.quantization == "nf4" else _eight_bits
        new: Any = make(bnb, weight, adapter, device)
        new.bias = _moved(layer.bias, device)
        new.requires_grad_(False)
        new.train(layer.training)
        model.set_submodule(name, new)
    if not found:
        raise InputError(
            f"{type(model).__name__} has no linear layer to quantise: "
            'use method="lora" without quantization.'
        )
    # What peft asks for (peft/tuners/lora/model.py).
    four = adapter.quantization == "nf4"
    setattr(model, "is_loaded_in_4bit" if four else "is_loaded_in_8bit", True)


def is_quantised(model: nn.Module) -> bool:
    """Whether a model has layers of bitsandbytes; it is not imported to tell."""
    return any(_kind(module) is not None for module in model.modules())


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


def _library() -> Any:  # noqa: ANN401 - the module
    try:
        return importlib.import_module("bitsandbytes")  # optional, and slow to import
    except ImportError:
        raise InputError(
            "A quantised base is made by bitsandbytes, which is not installed: "
            "pip install bitsandbytes. No GPU is needed for it."
        ) from None


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that transformers quantises in a model of its own."""
    from transformers import PreTrainedModel  # noqa: PLC0415 - takes seconds
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415
    from transformers.quantizers.base import HfQuantizer  # noqa: PLC0415
    from transformers.quantizers.quantizers_utils import (  # noqa: PLC0415
        should_convert_module,
    )

    skipped: list[str] = []
    if isinstance(model, PreTrainedModel):
        kept = list(model._keep_in_fp32_modules or ())  # noqa: SLF001 - as transformers
        skipped = HfQuantizer.get_modules_to_not_convert(model, None, kept)
        # The last layer is meant, too, where its last parameter is a bias: a
        # classifier's head, which is trained and so cannot be quantised.
        skipped += [name.rpartition(".")[0] for name, _ in model.named_parameters()][
            -1:
        ]
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear or isinstance(module, Conv1D)
        if name and is_linear and should_convert_module(name, skipped):
            yield name, module


def _four_bits(
    bnb: Any,  # noqa: ANN401
    weight: torch.Tensor,
    adapter: Adapter,
    device: torch.device | str | None,
) -> nn.Module:
    compute = DTYPES[adapter.compute_dtype]
    packing = Packing(
        nested=adapter.double_quantization, weight=weight.dtype, compute=compute
    )
    layer = _four_bits_on_meta(bnb, weight.shape[1], weight.shape[0], packing)
    if not weight.is_meta:
        layer.weight = bnb.nn.Params4bit(
            weight, compress_statistics=packing.nested, quant_type="nf4", module=layer
        ).to(weight.device if device is None else device)
    return layer


def _four_bits_on_meta(
    bnb: Any,  # noqa: ANN401
    inputs: int,
    outputs: int,
    packing: Packing,
) -> nn.Module:
    layer: Any = bnb.nn.Linear4bit(
        inputs,
        outputs,
        bias=False,
        compute_dtype=packing.compute,
        compress_statistics=packing.nested,
        quant_type="nf4",
        device="meta",
    )
    parts = packed_tensors(inputs * outputs, packing)
    state2 = None
    if packing.nested:
        state2 = bnb.functional.QuantState(
            parts["nested_absmax"], code=parts["nested_code"], blocksize=256
        )
    layer.quant_state = bnb.functional.QuantState(
        parts["absmax"],
        shape=torch.Size((outputs, inputs)),
        code=parts["code"],
        blocksize=packing.block,
        quant_type="nf4",
        dtype=packing.weight,
        offset=parts.get("offset"),
        state2=state2,
    )
    layer.weight = bnb.nn.Params4bit(
        parts["weight"],
        quant_state=layer.quant_state,
        blocksize=packing.block,
        compress_statistics=packing.nested,
        quant_type="nf4",
        quant_storage=packing.storage,
        module=layer,
        bnb_quantized=True,
    )
    return layer


def _eight_bits(
    bnb: Any,  # noqa: ANN401
    weight: torch.Tensor,
    _: Adapter,
    device: torch.device | str | None,
) -> nn.Module:
    outputs, inputs = weight.shape
    layer = _eight_bits_on_meta(bnb, inputs, outputs, INT8_THRESHOLD)
    if not weight.is_meta:
        where = weight.device if device is None else device
        # The library quantises what comes from the CPU.
        layer.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False).to(where)
    return layer


def _eight_bits_on_meta(
    bnb: Any,  # noqa: ANN401
    inputs: int,
    outputs: int,
    threshold: float,
) -> nn.Module:
    layer: Any = bnb.nn.Linear8bitLt(
        inputs,
        outputs,
        bias=False,
        has_fp16_weights=False,
        threshold=threshold,
        device="meta",
    )
    stored = torch.empty((outputs, inputs), dtype=torch.int8, device="meta")
    scales = torch.empty(outputs, dtype=torch.float32, device="meta")
    layer.weight = bnb.nn.Int8Params(stored, requires_grad=False, CB=stored, SCB=scales)
    return layer


def _moved(
    bias: nn.Parameter | None, device: torch.device | str | None
) -> nn.Parameter | None:
    if bias is None or device is None or bias.is_meta:
        return bias
    return nn.Parameter(bias.detach().to(device), requires_grad=False)


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
        new = _four_bits_on_meta(_library(), *widths, _packing(layer))
    else:
        new = _eight_bits_on_meta(_library(), *widths, _threshold(layer))
    new.bias = layer.bias
    return new.train(layer.training)


def _any(module: nn.Module) -> Any:  # noqa: ANN401 - a layer, whose class is optional
    return module


def _threshold(layer: Any) -> float:  # noqa: ANN401 - a Linear8bitLt
    if layer.state.has_fp16_weights:
        raise InputError(
            "A Linear8bitLt with has_fp16_weights=True cannot be planned: its weights "
            "are quantised in every step. Load the model with "
            "BitsAndBytesConfig(load_in_8bit=True)."
        )
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
