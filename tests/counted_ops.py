"""Ops that run, counted by name."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOps(TorchDispatchMode):
    """Counts the ops that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        """Matrix products."""
        return sum(self.counts[f"aten.{op}.default"] for op in ("mm", "addmm", "bmm"))
