"""One model of the zoo, and all of them.

Each file in ``tables/`` has its ``ENTRIES``; a new file needs no registration.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Entry:
    """A small model and what a user must say to plan it.

    Attributes:
        name: The model's class for stock models, else what is special about it; unique.
        family: The task, for example ``causal LM``; rows of the page are grouped by it.
        build: Makes the model with fresh weights. It is called under
            ``torch.device("meta")`` for planning and without it for training; sizes
            are tiny: 2 or 3 layers, widths up to 64.
        plan: Arguments of ``plan()`` and ``estimate()`` that a user must give for this
            model, such as ``batch=`` or ``loss=``; empty where all is made. A precision
            is one where bf16 cannot be trained.
        on_meta: Whether it can be built on meta; the real model is planned otherwise.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    plan: Mapping[str, Any] = field(default_factory=dict)
    on_meta: bool = True


@functools.cache
def zoo() -> dict[str, Entry]:
    """Return every entry of every table by its name."""
    entries: dict[str, Entry] = {}
    for path in sorted(TABLES.glob("*.py")):
        table = importlib.import_module(f"tests.zoo.tables.{path.stem}")
        for entry in table.ENTRIES:
            assert entry.name not in entries, f"two entries are called {entry.name}"
            entries[entry.name] = entry
    return entries
