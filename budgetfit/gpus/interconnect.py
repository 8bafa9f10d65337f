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

What connects the GPUs of a machine or cluster that is not the usual one is given as
text (``check_link``). Other rates than measured ones keep the measured latencies.
"""

import difflib
import re
from itertools import pairwise
from math import exp, log
from typing import Final, NamedTuple

from budgetfit.errors import InputError
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
OF_NODE: Final = 400.0  # GB/s of the network adapters of one measured node, 8 x 50
_NVLINK: Final = {
    **dict.fromkeys(("a100-40gb", "a100-80gb"), 3),
    **dict.fromkeys(("h100-80gb", "h200", "h20", "h800", "gh200"), 4),
    **dict.fromkeys(("b200", "b300", "gb200"), 5),
}
_PCIE: Final = {"pcie-3": 15.75, "pcie-4": 31.5, "pcie-5": 63.0}  # GB/s of x16
LINKS: Final = (
    *("nvlink-3", "nvlink-4", "nvlink-5"),
    *("pcie", *_PCIE),  # pcie: of the generation that the card has
    "infiniband",
)
_RATE: Final = re.compile(
    r"(?:(\d{1,9})\s*x\s*)?(\d{1,9}(?:\.\d{1,9})?)\s*(GB/s|Gb/s|Gbit/s)"
)
_EXAMPLE: Final = (
    "a bandwidth that collectives reach (25GB/s), or network adapters of each node x "
    "their rate (8x400Gb/s)"
)


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
        if ranks <= 1 or not payload_bytes:  # nothing to exchange
            return 0.0
        sent = payload_bytes * (ranks - 1) / ranks * (2 if reduces_all else 1)
        table = self.all_reduce if reduces_all else self.others
        return sent / _interpolated(table, payload_bytes)


def check_link(text: object) -> str:
    """Return what connects GPUs, in one spelling.

    A name of ``LINKS``, a bandwidth that large collectives reach (``25GB/s``), or the
    network adapters of each node and their rate (``8x50GB/s``, ``8x400Gb/s``). Two of
    them, with a comma: within a machine, and between machines. A bandwidth alone is
    that of both.

    Raises:
        InputError: If it is none of these; names the nearest.

    >>> check_link("NVLink 4, 8x200Gb/s")
    'nvlink-4,8x25GB/s'
    """
    if not isinstance(text, str):
        raise InputError(f'link must be text such as "pcie-4"; got {text!r:.80}.')
    parts = [_one_spelling(part) for part in text.split(",")]
    within, between = _of_each(parts)
    if not within and not between:
        raise InputError(
            f"{text!r:.80}: write the link within a machine, then that between "
            'machines, for example "nvlink-4,8x50GB/s".'
        )
    return ",".join(parts)


def is_between_nodes(link: str) -> bool:
    """Whether ``check_link``'s text says nothing of the GPUs of one machine."""
    return not _of_each(link.split(","))[0]


def _one_spelling(text: str) -> str:
    """Return one link in the spelling of ``LINKS``, or a rate in GB/s, or refuse it."""
    rate = _RATE.fullmatch(text.strip())
    if rate is not None:
        count, number, unit = rate.groups()
        value = float(number) / (1 if unit == "GB/s" else 8)
        if value > 0 and count != "0":
            return f"{count}x{value:g}GB/s" if count else f"{value:g}GB/s"
    key = re.sub(r"[^a-z0-9]", "", text.lower()).removesuffix(
        "0" if "." in text else ""
    )
    names = {name.replace("-", ""): name for name in LINKS}
    if key in names:
        return names[key]
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.4) or list(names)[:3]
    raise InputError(
        f"{text.strip()!r:.60} is no link between GPUs. Nearest: "
        f"{', '.join(names[each] for each in near)}. Or {_EXAMPLE}."
    )


def _of_each(parts: list[str]) -> tuple[str, str]:
    """Return the links within a machine and between machines; empty: the usual one."""
    # Both are empty where parts are not in that order.
    places = [
        "within"
        if part.startswith(("nvlink", "pcie"))
        else "between"
        if part == "infiniband" or "x" in part
        else ""
        for part in parts
    ]
    if len(parts) == 1:
        part, place = parts[0], places[0]
        return part if place != "between" else "", part if place != "within" else ""
    if parts[2:] or places[0] == "between" or places[1] == "within":
        return "", ""
    return parts[0], parts[1]


def find_link(gpu: Gpu, *, across_nodes: bool) -> Link:
    """Return the link between GPUs of one machine, or of several."""
    within, between = _of_each(gpu.interconnect.split(","))
    given = between if across_nodes else within
    if "/s" not in given:
        return _between(OF_NODE) if across_nodes else _within(gpu, given)
    count, _, rate = given.removesuffix("GB/s").rpartition("x")
    if count:
        each = float(rate)
        found = _between(int(count) * each)
        return found._replace(name=f"{count} x {each:g} GB/s between nodes")
    usual = _between(OF_NODE) if across_nodes else _within(gpu, "")
    reached = float(rate)
    return Link(
        f"{reached:g} GB/s{' between nodes' if across_nodes else ''}",
        _reaching(usual.all_reduce, reached),
        _reaching(usual.others, reached),
        0.8,
        1.3,
    )


def _between(gb_per_s: float) -> Link:
    """Return the link between nodes whose adapters have that rate together."""
    table = _longer_for_more(_NODES)
    if gb_per_s != OF_NODE:
        table = _reaching(table, table[-1][1] * gb_per_s / OF_NODE)
    return Link("8 x 50 GB/s between nodes", table, table, 0.7, 1.6)


def _within(gpu: Gpu, given: str) -> Link:
    """Return the link between the GPUs of a machine, by name; empty: the card's."""
    generation = _NVLINK.get(gpu.name)
    if given:
        generation = int(given[-1]) if given.startswith("nvlink") else None
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
    bus = _PCIE.get(given) or gpu.link_gb_per_s or SLOWEST_PCIE
    rate = bus * PCIE_SHARE
    table = tuple(
        (size, rate * size / (size + PCIE_RAMP_BYTES))
        for size in (float(2**power) for power in range(15, 33))
    )
    return Link(f"PCIe {given[-1]}" if "-" in given else "PCIe", table, table, 0.6, 2.5)


def _reaching(table: Anchors, gb_per_s: float) -> Anchors:
    """Return anchors that end at a rate, with the latencies of ``table``."""
    most = table[-1][1]
    return _longer_for_more(
        tuple(
            (size, size / (size / rate - size / most + size / gb_per_s))
            for size, rate in table
        )
    )


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
