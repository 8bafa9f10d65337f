"""The arguments of adapters, turned into values, and the model that they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from budgetfit.core.adapter import Adapter, ComputeDtype, parse_adapter
from budgetfit.core.byte_text import format_bytes
from budgetfit.core.precision import BF16_CAPABILITY, find_precision
from budgetfit.integrations.bitsandbytes import loading_peak_bytes
from budgetfit.integrations.peft import adapted_on_meta, to_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from budgetfit.core.gpus import Gpu
    from budgetfit.core.plan import Estimate


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


def model_to_trace(
    model: nn.Module, adapter: Adapter | None
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model that stands for ``model`` in traces, and what to know of it.

    Raises:
        InputError: If the adapter or a quantised layer cannot be had.
    """
    if adapter is not None:
        return adapted_on_meta(model, adapter)
    return to_trace(model), ()


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
