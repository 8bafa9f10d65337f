"""The cards that the null driver can imitate: every row of budgetfit's card table.

The table is read as a file, so that any Python will do: budgetfit itself, and what it
imports, need not be there.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
CARD_TABLE: Final = ROOT / "budgetfit" / "gpus" / "gpus.toml"


@dataclass(frozen=True, kw_only=True)
class ImitatedCard:
    """What decides the memory of a training step on a card.

    Attributes:
        name: budgetfit's canonical name.
        also: Further names, among them what torch calls the card.
        compute_capability: For example ``(8, 9)``.
        sm_count: Streaming multiprocessors.
        threads_per_sm: Most resident threads on one of them.
        total_bytes: Device memory as torch reports it.
    """

    name: str
    also: tuple[str, ...]
    compute_capability: tuple[int, int]
    sm_count: int
    threads_per_sm: int
    total_bytes: int

    @property
    def settings(self) -> dict[str, str]:
        """The environment that the null driver reads; ``src/device.c`` lists it."""
        major, minor = self.compute_capability
        return {
            "NULLCUDA_GPU": self.name,
            "NULLCUDA_CC": str(10 * major + minor),
            "NULLCUDA_SM": str(self.sm_count),
            "NULLCUDA_THREADS_PER_SM": str(self.threads_per_sm),
            "NULLCUDA_BYTES": str(self.total_bytes),
        }


def all_cards(table: Path = CARD_TABLE) -> tuple[ImitatedCard, ...]:
    """Every card of the table, in its order."""
    return tuple(
        ImitatedCard(
            name=row["name"],
            also=(row["title"], *row.get("also", ())),
            compute_capability=tuple(row["compute_capability"]),
            sm_count=row["sm_count"],
            threads_per_sm=row["threads_per_sm"],
            total_bytes=row["total_bytes"],
        )
        for row in tomllib.loads(table.read_text("utf-8"))["gpu"]
    )


def find_card(text: str, cards: tuple[ImitatedCard, ...] | None = None) -> ImitatedCard:
    """The card of that name; case, spaces and hyphens do not matter.

    A name of several cards that differ in memory only ("a100") means the largest, which
    is the least limit. The canonical name always means its own row.

    Raises:
        ValueError: No such card, or several that compute differently.

    >>> find_card("rtx4090").name, find_card("A100").name
    ('rtx-4090', 'a100-80gb')
    """
    cards = all_cards() if cards is None else cards
    wanted = _letters_and_digits(text)
    for card in cards:
        if _letters_and_digits(card.name) == wanted:
            return card
    found = [card for card in cards if wanted in map(_letters_and_digits, card.also)]
    if not found:
        names = ", ".join(card.name for card in cards)
        msg = f"no card is called {text!r}; the cards are {names}"
        raise ValueError(msg)
    kinds = {
        (card.compute_capability, card.sm_count, card.threads_per_sm) for card in found
    }
    if len(kinds) > 1:
        names = ", ".join(card.name for card in found)
        msg = f"{text!r} is the name of several cards: {names}"
        raise ValueError(msg)
    return max(found, key=lambda card: card.total_bytes)


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
