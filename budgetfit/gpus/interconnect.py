"""Bandwidth between GPUs: what NCCL's collectives reach, by payload.

Bus bandwidth is NCCL's: bytes over time, times ``(n - 1) / n`` for all-gather and
reduce-scatter and twice that for all-reduce, so that it is that of the links whatever
the number of ranks. Anchors are measurements of others, linear in between on log-log
scale:

* NVLink 3 (8 x A100), NVLink 4 (8 x H200) and 4 nodes with 8 x 50 GB/s each:
  stas00/ml-engineering, network/README.md. On NVLink 4 the all-reduce uses NVLS and
  the others do not: 361.4 and 362.9 of its 480 GB/s there.
* PCIe: 28 GB/s between 8 x RTX 5090 on PCIe 5.0 (NVIDIA/nccl#1639), in proportion to a
  card's own bus.
* NVLink 5 was not measured: twice NVLink 4, as its specification says.
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from budgetfit.gpus.table import Gpu

_MIB: Final = 2**20
Anchors = tuple[tuple[float, float], ...]  # payload in bytes, GB/s

_NVLINK_3: Final[Anchors] = (
    *((2**15, 1.31), (2**18, 7.47), (_MIB, 18.0), (4 * _MIB, 72.33)),
    *((16 * _MIB, 106.16), (64 * _MIB, 171.54), (256 * _MIB, 194.07)),
    *((2**30, 229.04), (2**32, 233.88)),
)
_NVLINK_4: Final[Anchors] = (
    *((2**15, 1.44), (2**18, 11.74), (_MIB, 39.93), (4 * _MIB, 107.16)),
    *((16 * _MIB, 219.89), (64 * _MIB, 346.51), (256 * _MIB, 436.15)),
    *((2**30, 463.58), (2**32, 473.1)),
)
_NODES: Final[Anchors] = (
    *((2**17, 0.45), (_MIB, 5.37), (4 * _MIB, 18.9), (16 * _MIB, 64.43)),
    *((64 * _MIB, 156.74), (256 * _MIB, 229.09), (2**30, 361.99)),
    *((2**32, 377.34),),
)
WITHOUT_NVLS: Final = 361.4 / 480.0
NVLINK_5_FACTOR: Final = 2.0
PCIE_SHARE: Final = 28.0 / 63.0  # of the bus rate, 8 x RTX 5090
PCIE_RAMP_BYTES: Final = _MIB  # half of the bandwidth at this payload
SLOWEST_PCIE: Final = 15.75  # PCIe 3.0 x16, where a card's bus is not known
_NVLINK: Final = {
    **dict.fromkeys(("a100-40gb", "a100-80gb"), 3),
    **dict.fromkeys(("h100-80gb", "h200", "h20", "h800", "gh200"), 4),
    **dict.fromkeys(("b200", "b300", "gb200"), 5),
}


class Link(NamedTuple):
    """How GPUs are connected.

    Attributes:
        name: For reports.
        all_reduce, others: Bus bandwidth by payload, GB/s.
        low, high: Factors on times: the range in which they are expected.
    """

    name: str
    all_reduce: Anchors
    others: Anchors
    low: float
    high: float

    def time_ns(self, payload_bytes: float, ranks: int, *, reduces_all: bool) -> float:
        """Return the time of a collective over so many ranks, in nanoseconds.

        ``payload_bytes``: of the whole tensor; ``reduces_all``: an all-reduce.
        """
        if ranks < 2 or not payload_bytes:  # noqa: PLR2004 - nothing to exchange
            return 0.0
        sent = payload_bytes * (ranks - 1) / ranks * (2 if reduces_all else 1)
        table = self.all_reduce if reduces_all else self.others
        return sent / _interpolated(table, payload_bytes)


def find_link(gpu: Gpu, *, across_nodes: bool) -> Link:
    """Return the link between GPUs of one machine, or of several."""
    if across_nodes:
        table = _longer_for_more(_NODES)
        return Link("8 x 50 GB/s between nodes", table, table, 0.7, 1.6)
    generation = _NVLINK.get(gpu.name)
    if generation == 3:  # noqa: PLR2004 - of NVLink
        table = _longer_for_more(_NVLINK_3)
        return Link("NVLink 3", table, table, 0.8, 1.3)
    if generation is not None:
        factor = NVLINK_5_FACTOR if generation > 4 else 1.0  # noqa: PLR2004
        return Link(
            f"NVLink {generation}",
            _scaled(_NVLINK_4, factor),
            _scaled(_NVLINK_4, factor * WITHOUT_NVLS),
            0.8 if factor == 1 else 0.6,
            1.3 if factor == 1 else 2.0,
        )
    rate = (gpu.link_gb_per_s or SLOWEST_PCIE) * PCIE_SHARE
    table = tuple(
        (size, rate * size / (size + PCIE_RAMP_BYTES))
        for size in (float(2**power) for power in range(15, 33))
    )
    return Link("PCIe", table, table, 0.6, 2.5)


def _longer_for_more(table: Anchors) -> Anchors:
    """Return anchors by which a larger payload never takes less time."""
    found: list[tuple[float, float]] = []
    shortest = 0.0
    for size, rate in table:
        shortest = max(shortest, size / rate)
        found.append((size, size / shortest))
    return tuple(found)


def _scaled(table: Anchors, factor: float) -> Anchors:
    return _longer_for_more(tuple((size, rate * factor) for size, rate in table))


def _interpolated(table: Anchors, payload_bytes: float) -> float:
    """Return GB/s, that is bytes per nanosecond; beyond the ends that of the end."""
    if payload_bytes <= table[0][0]:
        # Latency decides there: a smaller payload takes as long.
        return table[0][1] * payload_bytes / table[0][0]
    for (small, slow), (large, fast) in pairwise(table):
        if payload_bytes <= large:
            part = log(payload_bytes / small) / log(large / small)
            return exp(log(slow) + part * log(fast / slow))
    return table[-1][1]
