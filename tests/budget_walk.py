"""Where a budget goes: the files and names that it passes while a plan is made.

``python -m tests.budget_walk`` plans a small model and prints each function of
``planning``, ``solvers`` and ``memory`` that has the ``Budget``, or its limit in bytes,
as an argument or a local variable.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import budgetfit
from budgetfit.core.budget import Budget, plan_budget
from budgetfit.gpus.table import find_gpu
from tests.models import EXAMPLES

if TYPE_CHECKING:
    from types import FrameType

PACKAGE = str(Path(budgetfit.__file__).parent)
FOLDERS = tuple(f"{PACKAGE}/{name}/" for name in ("planning", "solvers", "memory"))
GPU = "rtx-4090"
VRAM_BYTES = 600_000_007  # a limit that no other number is equal to by chance


def walk() -> dict[str, set[str]]:
    """Return, for each file, the functions and names that the budget passes."""
    limit_bytes = plan_budget(VRAM_BYTES, find_gpu(GPU), 0).usable_bytes
    found: dict[str, set[str]] = {}

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "return" or not code.co_filename.startswith(FOLDERS):
            return
        for name, value in frame.f_locals.items():
            is_limit = type(value) is int and value == limit_bytes
            if is_limit or isinstance(value, Budget):
                file = code.co_filename.removeprefix(f"{PACKAGE}/")
                found.setdefault(file, set()).add(f"{code.co_qualname}: {name}")

    example = EXAMPLES["llama"]
    sys.setprofile(look)
    try:
        budgetfit.plan(
            example.model(), VRAM_BYTES, gpu=GPU, batch=example.batch, headroom=0
        )
    finally:
        sys.setprofile(None)
    return found


if __name__ == "__main__":
    files = walk()
    for file, names in sorted(files.items()):
        print(file, *sorted(names), sep="\n    ")
    print(f"{len(files)} files, {sum(map(len, files.values()))} names")
