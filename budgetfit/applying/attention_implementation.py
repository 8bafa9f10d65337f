"""Attention implementation of a transformers model (eager or sdpa) and its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from torch import nn


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
        heads = getattr(part, "num_attention_heads", None)
        kind = getattr(part, "_attn_implementation", None)
        if not hasattr(part, "to_dict") or not isinstance(heads, int):
            continue
        kind = "eager" if kind == "eager" else "sdpa"
        keys = getattr(part, "num_key_value_heads", None) or heads
        found.append(f"{kind}, {heads} heads, {keys} of keys")
    return "; ".join(found)


def check_attention(model: nn.Module, planned: str) -> None:
    """Compare a model's attention with what ``describe_attention`` said before.

    Raises:
        InputError: If it differs: it would take other memory than planned.
    """
    now = describe_attention(model)
    if now != planned:
        raise InputError(
            f"The model's attention was changed after apply: {now}, not {planned}. "
            "Change it back, or plan for it: set it before plan."
        )
