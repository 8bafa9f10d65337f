"""Replace linear layers by bitsandbytes' ``Linear4bit`` and ``Linear8bitLt``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

from budgetfit.applying.precision import DTYPES
from budgetfit.applying.quantized_layers.nf4_linear import Nf4Format, nf4_tensors
from budgetfit.core.adapter import INT8_THRESHOLD, Adapter, trained_heads
from budgetfit.errors import InputError
from budgetfit.integrations.optional_imports import import_library

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

    _How = Nf4Format | float  # compute dtypes of 4-bit layers


def quantize(
    model: nn.Module, adapter: Adapter, device: torch.device | str | None = None
) -> None:
    """Replace linear layers by quantized ones, as transformers does.

    All but the output layer and layers tied to it, or but the heads that peft trains;
    by bitsandbytes' own classes. On meta they get the quantized layout; with weights
    these are quantized. ``device``: where they go; None: where they are.

    Raises:
        InputError: If bitsandbytes is not installed, or there is no layer to quantize.
    """
    how: _How = INT8_THRESHOLD
    if adapter.quantization == "nf4":
        how = Nf4Format(
            nested=adapter.double_quantization, compute=DTYPES[adapter.compute_dtype]
        )
    _quantize(model, how, trained_heads(type(model).__name__) or None, device)


def quantize_as_stored(model: nn.Module, stored: BitsAndBytesConfig) -> None:
    """Replace linear layers as the checkpoint's ``quantization_config`` says.

    fp4 weights have the size of nf4 weights, which are used for them.

    Raises:
        InputError: As ``quantize``, or if the layers are quantized in every step.
    """
    if stored.load_in_8bit:
        if stored.llm_int8_has_fp16_weight:
            raise requantized_every_step_error()
        how: _How = stored.llm_int8_threshold
    else:
        how = Nf4Format(
            nested=stored.bnb_4bit_use_double_quant,
            storage=stored.bnb_4bit_quant_storage,
            compute=stored.bnb_4bit_compute_dtype,
        )
    _quantize(model, how, stored.llm_int8_skip_modules, None)


def library() -> Any:
    """Import bitsandbytes, or say what to install."""
    with compiled_when_called():
        return import_library(
            "bitsandbytes",
            "A quantised base is made by bitsandbytes, which is not installed: "
            "pip install bitsandbytes. No GPU is needed for it.",
        )


@contextlib.contextmanager
def compiled_when_called() -> Iterator[None]:
    """Let ``torch.compile`` compile functions when they are first called."""
    # bitsandbytes (0.50) decorates a few with it, of which a plan calls none, and for
    # that alone all of inductor is imported: 0.6 s of processor time.
    compile_now = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Callable[..., object]:
        if model is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))

        @functools.wraps(model)
        def call(*args: object, **kwargs: object) -> Any:
            return compiled()(*args, **kwargs)

        return call

    with mock.patch.object(torch, "compile", compile_later):
        yield


def meta_linear_4bit(
    bnb: Any, inputs: int, outputs: int, packing: Nf4Format
) -> nn.Module:
    """Return bitsandbytes' 4-bit layer on meta."""
    layer: Any = bnb.nn.Linear4bit(
        inputs,
        outputs,
        bias=False,
        compute_dtype=packing.compute,
        compress_statistics=packing.nested,
        quant_type="nf4",
        device="meta",
    )
    parts = nf4_tensors(inputs * outputs, packing)
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


def meta_linear_8bit(
    bnb: Any, inputs: int, outputs: int, threshold: float
) -> nn.Module:
    """Return bitsandbytes' 8-bit layer on meta."""
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


def requantized_every_step_error() -> InputError:
    """Return the error for 8-bit layers that quantize their weights in every step."""
    return InputError(
        "A Linear8bitLt with has_fp16_weights=True cannot be planned: its weights "
        "are quantised in every step. Load the model with "
        "BitsAndBytesConfig(load_in_8bit=True)."
    )


def _quantize(
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
        if isinstance(how, Nf4Format):
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
    # attributes that peft reads (peft/tuners/lora/model.py)
    four = isinstance(how, Nf4Format)
    setattr(model, "is_loaded_in_4bit" if four else "is_loaded_in_8bit", True)


def _linear_layers(
    model: nn.Module, asked: list[str] | None
) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers that transformers quantizes in its models.

    ``asked``: explicit ``llm_int8_skip_modules``; the default ones are quantized then.
    """
    from transformers import PreTrainedModel  # noqa: PLC0415 - takes seconds
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415
    from transformers.quantizers.base import HfQuantizer  # noqa: PLC0415
    from transformers.quantizers.quantizers_utils import should_convert_module  # noqa: PLC0415

    skipped = list(asked or ())
    if isinstance(model, PreTrainedModel):
        kept = list(model._keep_in_fp32_modules or ())  # noqa: SLF001 - as transformers
        skipped = HfQuantizer.get_modules_to_not_convert(model, asked, kept)
        if asked is None:
            # Skip the last layer also where its last parameter is a bias: a
            # classifier's head, which is trained and so cannot be quantized.
            last = [name for name, _ in model.named_parameters()][-1:]
            skipped += [name.rpartition(".")[0] for name in last]
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear or isinstance(module, Conv1D)
        if name and is_linear and should_convert_module(name, skipped):
            yield name, module


def _four_bits(
    bnb: Any, weight: torch.Tensor, how: Nf4Format, device: torch.device | str | None
) -> nn.Module:
    packing = replace(how, weight=weight.dtype)
    layer = meta_linear_4bit(bnb, weight.shape[1], weight.shape[0], packing)
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
    bnb: Any, weight: torch.Tensor, threshold: float, device: torch.device | str | None
) -> nn.Module:
    outputs, inputs = weight.shape
    layer = meta_linear_8bit(bnb, inputs, outputs, threshold)
    if not weight.is_meta:
        where = weight.device if device is None else device
        # bitsandbytes quantizes on the move from CPU to GPU.
        layer.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False).to(where)
    return layer


def _moved(
    bias: nn.Parameter | None, device: torch.device | str | None
) -> nn.Parameter | None:
    if bias is None or device is None or bias.is_meta:
        return bias
    return nn.Parameter(bias.detach().to(device), requires_grad=False)
