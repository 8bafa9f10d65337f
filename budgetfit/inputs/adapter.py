"""LoRA adapter arguments, the model to trace with them, attaching them to a model."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from budgetfit.applying.undo import Undo
from budgetfit.core.adapter import ALL_LINEAR, Adapter, ComputeDtype, parse_adapter
from budgetfit.core.plan import Estimate, Plan
from budgetfit.core.precision import BF16_CAPABILITY, find_precision
from budgetfit.errors import InputError
from budgetfit.gpus.table import Gpu
from budgetfit.integrations.model_sources.resolved_model import ResolvedModel
from budgetfit.integrations.peft import (
    adapted_meta_copy,
    ensure_adapters,
    traceable_model,
)
from budgetfit.integrations.quantization.traceable_layers import (
    is_quantized,
    with_stored_quantization,
)
from budgetfit.integrations.quantization.unquantized_modules import size_notes
from budgetfit.integrations.source_code.python_source import DTYPES
from budgetfit.traces.quantized_loading import (
    TRANSFORMERS_IN_ORDER,
    has_quantized_layers,
)
from budgetfit.utils.format_bytes import format_bytes
from budgetfit.workload.diffusers_targets import attention_projections


def find_adapter(
    method: str | None, gpu: Gpu, precisions: Sequence[str], **asked: Any
) -> Adapter | None:
    """Parse adapter arguments, with a compute dtype that the GPU supports.

    Raises:
        InputError: If an argument is invalid.
    """
    weights = {find_precision(name).weights for name in precisions}
    mixed = any(find_precision(name).autocast for name in precisions)
    compute: ComputeDtype = "fp32"
    if mixed or weights != {"fp32"}:
        capable = gpu.compute_capability >= BF16_CAPABILITY
        compute = "bf16" if capable else "fp16"
    return parse_adapter(method, compute_dtype=compute, **asked)


def base_of_adapter(resolved: ResolvedModel, adapter: Adapter | None) -> ResolvedModel:
    """Return the model with weights in the dtype in which adapters are trained."""
    if adapter is None or not resolved.frozen_in_compute_dtype:
        return resolved
    return resolved.in_dtype(getattr(torch, DTYPES[adapter.compute_dtype]))


def adapter_as_stored(
    resolved: ResolvedModel, adapter: Adapter | None, *, given: bool
) -> tuple[Adapter | None, tuple[str, ...]]:
    """Adjust the adapter to weights that are already quantized; also returns notes.

    ``given``: the user passed a module rather than a description of one.

    Raises:
        InputError: If such weights cannot be trained as requested.
    """
    name = resolved.name
    if adapter is not None and adapter.target_modules == ALL_LINEAR:
        targets = attention_projections(resolved.model)
        if targets:
            adapter = replace(adapter, target_modules=targets)
    if adapter is None:
        if not given and is_quantized(resolved.model):
            raise InputError(
                f"The weights of {name} are stored quantised by bitsandbytes, and such "
                'weights are not trained. Train adapters on them: method="lora" '
                "(--method lora); or give the unquantised model that it was made from."
            )
        return None, ()
    if adapter.quantization is not None and resolved.stored_in:
        raise InputError(
            f"The weights of {name} are stored in {resolved.stored_in}, and "
            "from_pretrained does not quantise them again with bitsandbytes. Use "
            'method="lora" (--method lora), or give an unquantised copy of the model.'
        )
    stored = with_stored_quantization(adapter, resolved.model)
    asked = adapter.quantization
    if asked in (None, stored.quantization):
        return stored, ()
    kept = f"the base is stored in {stored.quantization} and stays so"
    return stored, (f"{kept}: {asked} is not used",)


def model_to_trace(
    model: nn.Module, adapter: Adapter | None
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model to trace, with adapters and quantized layers; and notes.

    Raises:
        InputError: If the adapter or a quantized layer cannot be created.
    """
    if adapter is not None:
        return adapted_meta_copy(model, adapter)
    notes = size_notes(model, prepared=False) if is_quantized(model) else ()
    return traceable_model(model), notes


def loading_notes(model: nn.Module, estimate: Estimate) -> tuple[str, ...]:
    """Return notes on loading a quantized model: what takes more than the plan says."""
    if not has_quantized_layers(model):
        return ()
    notes = []
    peak_bytes = estimate.allocated_bytes
    training_bytes = max(estimate.phase_peaks_bytes.values())
    if peak_bytes > training_bytes:
        notes.append(
            f"loading takes more than training: {format_bytes(peak_bytes)}, as weights "
            "are on the card in two forms while they are quantised and cast; training "
            f"takes {format_bytes(training_bytes)}"
        )
    installed = metadata.version("transformers")
    if Version(installed) < TRANSFORMERS_IN_ORDER:
        notes.append(
            f"transformers {installed} copies weights onto the card before it is their "
            "turn to be quantised, which can leave much more reserved than predicted: "
            "install 5.4 or later, or set HF_DEACTIVATE_ASYNC_LOAD=1 where you load"
        )
    return tuple(notes)


def attach_planned_adapter(plan: Plan, model: object, undo: Undo) -> Any:  # noqa: ANN401
    """Return the model that a plan trains; ``undo`` restores the plain one.

    ``model``: a plain module gets the adapters; one that has some is trained as it is,
    and so is what is no module (a hub id). None: the one that was planned.

    Raises:
        InputError: If it must be loaded quantized, and is not.
    """
    if plan.adapter is None:
        return model
    if model is None and plan.source is not None:
        model = plan.source.model
    if isinstance(model, nn.Module):
        model, restore = ensure_adapters(model, plan.adapter)
        undo.add(restore)
    return model
