"""How a transformers model runs attention: what its memory depends on beside sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from torch import nn


def attention_of(model: nn.Module) -> str:
    """Return a transformers model's attention and heads, in words.

    For example "sdpa, 32 heads, 8 of keys". Flash attention is called sdpa: either
    takes memory in proportion to the length. A part with a config of its own (a tower)
    is told apart. Empty for other models.
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


class SameAttention:
    """Sees that a model runs attention as it did when its run began.

    Args:
        model: With the attention that it has.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = model, attention_of(model)

    def check(self) -> None:
        """Look at the model as it is now.

        Raises:
            InputError: If it takes other memory than planned.
        """
        now = attention_of(self._model)
        if now != self._before:
            raise InputError(
                f"The model's attention was changed after apply: {now}, not "
                f"{self._before}. Change it back, or plan for it: set it before plan."
            )
