"""Attention implementation of a transformers model (eager or sdpa) and its heads."""

from typing import Any

from torch import nn

from budgetfit.errors import InputError


def describe_attention(model: nn.Module) -> str:
    """Return a transformers model's attention implementation and head counts as text.

    For example "sdpa, 32 heads, 8 of keys". Flash attention is called sdpa: the memory
    of either is linear in the length. A submodel with its own config (a tower) is
    listed separately. Empty for other models.
    """
    config = getattr(model, "config", None)
    parts = [config, *vars(config).values()] if hasattr(config, "to_dict") else []
    found = []
    for part in parts:
        heads = _head_counts(part, "num_attention_heads")
        kind = getattr(part, "_attn_implementation", None)
        if not hasattr(part, "to_dict") or not heads:
            continue
        kind = "eager" if kind == "eager" else "sdpa"
        keys = _head_counts(part, "num_key_value_heads") or heads
        found.append(f"{kind}, {heads} heads, {keys} of keys")
    return "; ".join(found)


def _head_counts(config: Any, name: str) -> str:
    """Return a count of heads, or those of layers that differ; empty without any."""
    try:
        counts = [getattr(config, name, None)]
    except Exception:  # noqa: BLE001 - transformers' own, where layers differ
        layers = config.per_layer_config
        counts = [getattr(layer, name, None) for layer in layers]
    numbers: list[object] = []
    for count in counts:  # a list for the stages of a backbone (Swin)
        numbers.extend(count if isinstance(count, (list, tuple)) else [count])
    return " or ".join(
        dict.fromkeys(str(n) for n in numbers if isinstance(n, int) and n)
    )


def check_attention(model: nn.Module, planned: str) -> None:
    """Refuse a model whose attention is not the planned one: it takes other memory."""
    now = describe_attention(model)
    if now != planned:
        raise InputError(
            f"The model's attention was changed after apply: {now}, not {planned}. "
            "Change it back, or plan for it: set it before plan."
        )
