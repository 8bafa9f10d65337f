"""Plans of models and losses that hold objects linked in circles.

    python -m benchmarks.linked_objects

Each object knows its two neighbours, or all others, so that there are as many links as
the square of their number; one holds a lock, which cannot be copied. They are an
attribute of a block, or what the loss closes over together with a frozen teacher.
Processor seconds of one plan each, imports excluded, over those of the same plan
without such objects.
"""

import copy
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

import budgetfit
from benchmarks.shared import quiet, table

NUMBERS: Final = (5, 50, 500)
BATCH: Final = torch.zeros(8, 64)


class Linked:
    """Knows others of its kind."""

    def __init__(self) -> None:
        self.others: list[Linked] = []
        self.lock: Any = None


def linked(number: int, *, all_of_them: bool) -> list[Linked]:
    """Return so many objects in a circle, or each of which knows all."""
    rows = [Linked() for _ in range(number)]
    for at, each in enumerate(rows):
        near = [rows[(at + 1) % number], rows[at - 1]]
        each.others = list(rows) if all_of_them else near
    rows[number // 2].lock = threading.Lock()
    return rows


def seconds(rows: list[Linked], where: str) -> float:
    """Plan once, and return the processor time."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(4)))
    loss = mean
    if where == "a block":
        model[1].linked = rows[:1]
    else:
        loss = distilled(rows[:1], copy.deepcopy(model).requires_grad_(False))
    started = time.process_time()
    budgetfit.plan(model, vram="1GB", batch=BATCH, loss=loss, batch_size=8)
    return time.process_time() - started


def mean(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return what is trained on."""
    return outputs.mean()


def distilled(rows: list[Linked], teacher: nn.Module) -> Callable[..., torch.Tensor]:
    """Return a loss whose linked objects hold the teacher, too."""
    for each in rows:
        each.lock = None
    holder = rows[0] if rows else Linked()
    holder.lock = teacher

    def loss(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = holder.lock(batch)
        return nn.functional.mse_loss(outputs, wanted)

    return loss


def main() -> None:
    """Print the table."""
    quiet()
    rows = []
    for where in ("a block", "the loss"):
        for all_of_them in (False, True):
            seconds([], where)  # the first plan of a process is slower
            plain = seconds([], where)
            row = [where, "all others" if all_of_them else "two neighbours"]
            for number in NUMBERS:
                taken = seconds(linked(number, all_of_them=all_of_them), where)
                row.append(f"{taken:.2f} ({taken / plain:.1f} x)")
            rows.append(row)
    heads = ["held by", "each knows", *(f"{number} objects" for number in NUMBERS)]
    print(table(heads, rows))


if __name__ == "__main__":
    main()
