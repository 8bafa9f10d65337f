"""Batches in host memory: their tensors are allocated when a loop moves them."""

from collections.abc import Callable, Iterator
from typing import Any


class HostBatch:
    """A batch of a data loader, not yet on the device.

    Libraries move what has a ``to`` by calling it (accelerate's ``send_to_device``,
    Lightning's ``move_data_to_device``).
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    def to(self, *_: Any, **__: Any) -> Any:
        """Return the batch's tensors, newly allocated."""
        return self._load()


class HostBatches:
    """A data loader without an end."""

    # More than are traced; loops want to know.
    LENGTH = 1 << 20

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    def __len__(self) -> int:
        return self.LENGTH

    def __iter__(self) -> Iterator[HostBatch]:
        for _ in range(self.LENGTH):
            yield HostBatch(self._load)
