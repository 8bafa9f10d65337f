"""Entries that are known not to work, by name, each with the reason.

``test_zoo`` fails for a name that works again, so that it leaves this list.
"""

from __future__ import annotations

_CODEBOOKS = (
    "reads four rows of audio codes per sample, which no made batch has: pass batch="
)

KNOWN_FAILURES: dict[str, str] = {
    "MusicgenForCausalLM": _CODEBOOKS,
    "MusicgenMelodyForCausalLM": _CODEBOOKS,
    "xLSTMForCausalLM": (
        "does not train without its own library: its backward pass finds states that "
        "were overwritten, in plain PyTorch too"
    ),
    "user's slots and a property as weight": (
        "torch's Module does not copy __slots__: the weightless copy that alternatives "
        "are found with has none (the trace's own copy has)"
    ),
}
