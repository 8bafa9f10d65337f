"""Addresses of the null driver, for what is compared with a recording made on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from budgetfit.memory.segment_addresses import SegmentAddresses


@contextmanager
def null_driver_addresses() -> Iterator[None]:
    """Replay with addresses that rise, which a real driver's do not."""
    with mock.patch.object(SegmentAddresses, "rise", new=True):
        yield
