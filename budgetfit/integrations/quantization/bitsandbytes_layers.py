"""bitsandbytes: its quantised layers, put in the place of linear ones."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.applying.quantized_layers.nf4_linear import Packing, packed_tensors
from budgetfit.core.adapter import INT8_THRESHOLD, Adapter, ComputeDtype
from budgetfit.errors import InputError
from budgetfit.integrations.optional_imports import quiet_import

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import BitsAndBytesConfig

    _How = Packing | float  # of 4-bit layers; the threshold of 8-bit ones

DTYPES: dict[ComputeDtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


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
    how: _How = INT8_THRESHOLD
    if adapter.quantization == "nf4":
        how = Packing(
            nested=adapter.double_quantization, compute=DTYPES[adapter.compute_dtype]
        )
    _quantise(model, how, None, device)


def quantise_as_stored(model: nn.Module, stored: BitsAndBytesConfig) -> None:
    """Put in the layers that a checkpoint has by its own ``quantization_config``.

    Weights in fp4 take what they take in nf4, which stands for them.

    Raises:
        InputError: As ``quantise``, or if the layers are quantised in every step.
    """
    if stored.load_in_8bit:
        if stored.llm_int8_has_fp16_weight:
            raise quantised_in_every_step()
        how: _How = stored.llm_int8_threshold
    else:
        how = Packing(
            nested=stored.bnb_4bit_use_double_quant,
            storage=stored.bnb_4bit_quant_storage,
            compute=stored.bnb_4bit_compute_dtype,
        )
    _quantise(model, how, stored.llm_int8_skip_modules, None)


def library() -> Any:  # noqa: ANN401 - the module
    """Return bitsandbytes.

    Raises:
        InputError: If it is not installed.
    """
    try:
        with quiet_import():
            return importlib.import_module("bitsandbytes")  # optional, and slow
    except ImportError:
        raise InputError(
            "A quantised base is made by bitsandbytes, which is not installed: "
            "pip install bitsandbytes. No GPU is needed for it."
        ) from None


def four_bits_on_meta(
    bnb: Any,  # noqa: ANN401
    inputs: int,
    outputs: int,
    packing: Packing,
) -> nn.Module:
    """Return a 4-bit layer of the library, without values."""
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


def eight_bits_on_meta(
    bnb: Any,  # noqa: ANN401
    inputs: int,
    outputs: int,
    threshold: float,
) -> nn.Module:
    """Return an 8-bit layer of the library, without values."""
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


def quantised_in_every_step() -> InputError:
    """Return the refusal of layers whose weights are not quantised for good."""
    return InputError(
        "A Linear8bitLt with has_fp16_weights=True cannot be planned: its weights "
        "are quantised in every step. Load the model with "
        "BitsAndBytesConfig(load_in_8bit=True)."
    )


def _quantise(
    model: nn.Module,
    how: _How,
    skipped: list[str] | None,
    device: torch.device | str | None,
) -> None:
    bnb = library()
    found = list(_linear_layers(model, skipped))
    for name, layer in found:
        weight = layer.weight.data
        if not isinstance(layer, nn.Linear):  # GPT-2's Conv1D: transposed
            weight = weight.t().contiguous()
        if isinstance(how, Packing):
            new: Any = _four_bits(bnb, weight, how, device)
        else:
            new = _eight_bits(bnb, weight, how, device)
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
    four = isinstance(how, Packing)
    setattr(model, "is_loaded_in_4bit" if four else "is_loaded_in_8bit", True)


def _linear_layers(
    model: nn.Module, asked: list[str] | None
) -> Iterator[tuple[str, Any]]:
    """Yield the layers that transformers quantises in a model of its own.

    ``asked`` are the layers to skip, where somebody named them; the usual ones are
    quantised then.
    """
    from transformers import PreTrainedModel  # noqa: PLC0415 - takes seconds
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415
    from transformers.quantizers.base import HfQuantizer  # noqa: PLC0415
    from transformers.quantizers.quantizers_utils import (  # noqa: PLC0415
        should_convert_module,
    )

    skipped = list(asked or ())
    if isinstance(model, PreTrainedModel):
        kept = list(model._keep_in_fp32_modules or ())  # noqa: SLF001 - as transformers
        skipped = HfQuantizer.get_modules_to_not_convert(model, asked, kept)
        if asked is None:
            # The last layer is meant, too, where its last parameter is a bias: a
            # classifier's head, which is trained and so cannot be quantised.
            last = [name for name, _ in model.named_parameters()][-1:]
            skipped += [name.rpartition(".")[0] for name in last]
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear or isinstance(module, Conv1D)
        if name and is_linear and should_convert_module(name, skipped):
            yield name, module


def _four_bits(
    bnb: Any,  # noqa: ANN401
    weight: torch.Tensor,
    how: Packing,
    device: torch.device | str | None,
) -> nn.Module:
    packing = replace(how, weight=weight.dtype)
    layer = four_bits_on_meta(bnb, weight.shape[1], weight.shape[0], packing)
    if not weight.is_meta:
        layer.weight = bnb.nn.Params4bit(
            weight,
            compress_statistics=packing.nested,
            quant_type="nf4",
            quant_storage=packing.storage,
            module=layer,
        ).to(weight.device if device is None else device)
    return layer


def _eight_bits(
    bnb: Any,  # noqa: ANN401
    weight: torch.Tensor,
    threshold: float,
    device: torch.device | str | None,
) -> nn.Module:
    outputs, inputs = weight.shape
    layer = eight_bits_on_meta(bnb, inputs, outputs, threshold)
    if not weight.is_meta:
        where = weight.device if device is None else device
        # The library quantises what comes from the CPU.
        layer.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False).to(where)
    return layer


def _moved(
    bias: nn.Parameter | None, device: torch.device | str | None
) -> nn.Parameter | None:
    if bias is None or device is None or bias.is_meta:
        return bias
    return nn.Parameter(bias.detach().to(device), requires_grad=False)
