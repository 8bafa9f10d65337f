"""The bytes of quantized weights."""

from typing import Any

from budgetfit.applying.quantized_layers.stored_weights import stored_tensors


def stored_bytes(weight: Any) -> dict[str, int]:  # noqa: ANN401 - of bitsandbytes
    """Return the bytes of each tensor of a real quantized weight."""
    tensors = stored_tensors(weight)
    return {name: value.untyped_storage().nbytes() for name, value in tensors.items()}
