"""Cases that cover every pair of settings: an all-pairs design, frozen as data.

Each model meets every precision, every optimizer, every way of checkpointing that it
has, and both counts of micro-batches; over all rows every pair of (precision,
checkpointing, optimizer, accumulation, card) occurs that can. ``test_recordings.py``
holds them to it.

The rows were drawn at random until they did so, the last two added by hand. Batch sizes
fill a fifth or three quarters of the card, by estimates of budgetfit where they were
drawn: what is recorded does not depend on whether those were right.
"""

from pathlib import Path
from typing import Final, NamedTuple, cast

from tests.accuracy import models
from tests.accuracy.case import Checkpointing, Model, Precision


class Row(NamedTuple):
    """One case."""

    model: Model
    gpu: str
    batch_size: int
    precision: Precision
    checkpointing: Checkpointing
    optimizer: str
    gradient_accumulation_steps: int


_TABLE: Final = Path(__file__).with_suffix(".txt")


def _row(words: str) -> Row:
    model, gpu, size, precision, checkpointing, optimizer, steps = words.split()
    return Row(
        getattr(models, model),
        gpu,
        int(size),
        cast("Precision", precision),
        cast("Checkpointing", checkpointing),
        optimizer,
        int(steps),
    )


PAIRWISE: Final = tuple(map(_row, _TABLE.read_text("utf-8").splitlines()))
