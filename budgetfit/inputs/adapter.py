"""The arguments of adapters, turned into values, and the model that they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from budgetfit.core.adapter import Adapter, ComputeDtype, parse_adapter
from budgetfit.core.precision import BF16_CAPABILITY, find_precision
from budgetfit.errors import InputError
from budgetfit.integrations.peft import adapted_on_meta, to_trace
from budgetfit.integrations.quantization.bitsandbytes import (
    as_stored,
    is_quantised,
    loading_peak_bytes,
)
from budgetfit.integrations.quantization.unquantized_modules import size_notes
from budgetfit.utils.format_bytes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from budgetfit.core.plan import Estimate
    from budgetfit.gpus.table import Gpu
    from budgetfit.integrations.model_sources.resolved_model import ResolvedModel


def find_adapter(
    method: str | None,
    gpu: Gpu,
    precisions: Sequence[str],
    **asked: Any,  # noqa: ANN401 - the arguments of parse_adapter
) -> Adapter | None:
    """Return the adapter that was asked for, computed with as the card can.

    Raises:
        InputError: If something cannot be what was meant.
    """
    weights = {find_precision(name).weights for name in precisions}
    mixed = any(find_precision(name).autocast for name in precisions)
    compute: ComputeDtype = "fp32"
    if mixed or weights != {"fp32"}:
        capable = gpu.compute_capability >= BF16_CAPABILITY
        compute = "bf16" if capable else "fp16"
    return parse_adapter(method, compute_dtype=compute, **asked)


def adapter_as_stored(
    resolved: ResolvedModel, adapter: Adapter | None, *, given: bool
) -> tuple[Adapter | None, tuple[str, ...]]:
    """Return the adapter as it is on weights that are quantised already, and notes.

    Args:
        resolved: The model.
        adapter: What was asked for.
        given: Whether the user handed in the module, and not what describes one.

    Raises:
        InputError: If such weights cannot be trained as asked.
    """
    name = resolved.name
    if adapter is None:
        if not given and is_quantised(resolved.model):
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
    stored = as_stored(adapter, resolved.model)
    asked = adapter.quantization
    if asked in (None, stored.quantization):
        return stored, ()
    kept = f"the base is stored in {stored.quantization} and stays so"
    return stored, (f"{kept}: {asked} is not used",)


def model_to_trace(
    model: nn.Module, adapter: Adapter | None
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model that stands for ``model`` in traces, and what to know of it.

    Raises:
        InputError: If the adapter or a quantised layer cannot be had.
    """
    if adapter is not None:
        return adapted_on_meta(model, adapter)
    notes = size_notes(model, prepared=False) if is_quantised(model) else ()
    return to_trace(model), notes


def loading_notes(model: nn.Module, estimate: Estimate) -> tuple[str, ...]:
    """Say when loading a quantised model takes more than training it."""
    peak_bytes = loading_peak_bytes(model)
    if peak_bytes is None or peak_bytes <= estimate.allocated_bytes:
        return ()
    return (
        (
            f"loading takes more than training: up to {format_bytes(peak_bytes)}, as "
            "a weight is on the card in both forms while it is quantised"
        ),
    )
