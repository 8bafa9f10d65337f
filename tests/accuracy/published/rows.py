"""What others measured and published, as data, and why some of it has no prediction."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("measurements.json")

# Adapters of peft that are rebuilt here (adapters.py); the others each need code of
# their own that only peft has.
PEFT_METHODS = (
    *("full", "LORA r=10", "LORA r=32", "LORA r=64"),
    *("LN_TUNING", "BEFT", "IA3"),
)
_COMPILED_GROUPS = ("torchtune Llama 3.1", "torchtitan graph trainer")
_COMPILER_DECIDES = (
    "compiled; which blocks were recomputed is not stated, or the compiler decided it"
)
_OTHER_LORA = ("lorafa", "mica", "dora", "bdlora", "all-attn")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement.

    Attributes:
        name: Unique.
        group: Which table it is from.
        label: What its author calls it.
        model, method, dtype, optimizer, recomputed, versions: As published.
        source: Address.
        card: Canonical name; empty where none was stated.
        cards: How many.
        footprint: ``allocated``, ``reserved``, ``process``, or ``unknown``.
        published: The number as printed; None for a run that ended out of memory.
        bytes: The same in bytes.
        batch_size, length: Of a micro-batch; None where not stated.
        compiled: Whether torch.compile, or another compiler, was on.
        within: What the row's unknowns allow, as a share of the number.
        context_bytes: The CUDA context as the author measured it.
        trained: Trained parameters, where stated.
    """

    name: str
    group: str
    label: str
    model: str
    source: str
    card: str
    cards: int
    footprint: str
    published: str | None
    bytes: int | None
    method: str
    batch_size: int | None
    length: int | None
    dtype: str
    optimizer: str
    recomputed: str
    compiled: bool
    within: float
    versions: str = ""
    context_bytes: int = 0
    trained: int | None = None

    @property
    def settings(self) -> str:
        """The settings that decide memory, in one line."""
        size = f"{self.batch_size or '?'} x {self.length or '?'}"
        parts = [self.method, size, self.dtype, self.optimizer]
        if self.recomputed != "nothing":
            parts.append(f"recomputed: {self.recomputed}")
        return ", ".join(part for part in parts if part)


@functools.cache
def rows() -> tuple[Row, ...]:
    """Every published row that is known."""
    return tuple(Row(**row) for row in json.loads(FILE.read_text()))


def no_prediction(row: Row) -> str | None:
    """Why a row cannot be predicted; None where it can."""
    reasons = {
        f"ran on {row.cards} cards; budgetfit plans for one": row.cards > 1,
        "4-bit weights of bitsandbytes": "QLoRA" in row.method or "nf4" in row.dtype,
        _COMPILER_DECIDES: row.group in _COMPILED_GROUPS,
        "torch.compile decides what is kept": row.compiled,
        "8-bit optimizer of bitsandbytes": "8-bit" in row.label,
        "the longest of unpacked samples decides, and its length is not stated": (
            row.group == "torchtune ladder" and row.length is None
        ),
        f"peft's {row.label} is not rebuilt here": _is_other_adapter(row),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _is_other_adapter(row: Row) -> bool:
    return row.group == "peft MetaMathQA" and (
        row.method not in PEFT_METHODS or any(word in row.label for word in _OTHER_LORA)
    )
