"""What others measured on real cards, as data: one file for each card."""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("t4_runs.json")
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class CardRun:
    """One LoRA or QLoRA run; ``FILE`` says in words what its program does.

    Attributes:
        model: Hub id; ``config`` has its sizes.
        attention: ``eager``, or ``sdpa`` by the memory-efficient kernel.
        length, batch_size: Tokens of a sample, samples of a step.
        quantization: How the base is stored: ``nf4``, or None for fp16.
        trained: Number of trained parameters.
        loaded_mib: Allocated before the first step.
        forward_mib, backward_mib, optimizer_mib: Peaks of allocated memory in the
            phases of a third step.
        allocated_mib, reserved_mib: Peaks of the second step; reserved memory only
            grows, so that its peak is also that of loading and of the first step.
        process_mib: Reserved, and the CUDA context.
        stack, source: Versions of the libraries, and the file of the row.
    """

    model: str
    attention: str
    length: int
    batch_size: int
    quantization: str | None
    trained: int
    loaded_mib: float
    forward_mib: float
    backward_mib: float
    optimizer_mib: float
    allocated_mib: float
    reserved_mib: float
    process_mib: float
    stack: str
    source: str
    config: dict[str, Any] = field(repr=False, compare=False)

    @property
    def setting(self) -> tuple[str, str, int, int, str | None]:
        """What decides the prediction: runs that repeat another have the same."""
        return (
            *(self.model, self.attention, self.length),
            *(self.batch_size, self.quantization),
        )


@functools.cache
def runs() -> tuple[CardRun, ...]:
    """Every run on a real card that is known."""
    data = json.loads(FILE.read_text())
    configs = data["configs"]
    return tuple(CardRun(**row, config=configs[row["model"]]) for row in data["rows"])
