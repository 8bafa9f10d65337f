"""The bytes of quantized weights."""

from budgetfit.applying.quantized_layers.stored_weights import stored_tensors


def stored_bytes(weight: object) -> dict[str, int]:
    """Return the bytes of each tensor of a real quantized weight."""
    tensors = stored_tensors(weight)
    return {name: value.untyped_storage().nbytes() for name, value in tensors.items()}
