"""What connects GPUs: names and bandwidths that users give, and what they change."""

from dataclasses import replace
from itertools import pairwise

import pytest

from budgetfit.errors import InputError
from budgetfit.gpus.interconnect import LINKS, Link, check_link, find_link
from budgetfit.gpus.table import all_gpus, find_gpu
from budgetfit.inputs.several_gpus import parse_link

LARGE, SMALL = 2**30, 2**15


def link(card: str, text: str, *, across_nodes: bool = False) -> Link:
    gpu = replace(find_gpu(card), interconnect=check_link(text))
    return find_link(gpu, across_nodes=across_nodes)


def reached(found: Link, payload_bytes: int = LARGE) -> float:
    return payload_bytes * 7 / 8 / found.time_ns(payload_bytes, 8, reduces_all=False)


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("NVLink 4", "nvlink-4"),
        ("PCIe 4.0", "pcie-4"),
        ("pcie", "pcie"),
        ("200Gb/s", "25GB/s"),
        ("200 Gbit/s", "25GB/s"),
        ("8 x 400Gb/s", "8x50GB/s"),
        ("nvlink-3, 8x12.5GB/s", "nvlink-3,8x12.5GB/s"),
        ("25GB/s,InfiniBand", "25GB/s,infiniband"),
    ],
)
def test_a_link_has_one_spelling(text: str, spelled: str) -> None:
    assert check_link(text) == spelled
    assert check_link(spelled) == spelled


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nvlink-9", "Nearest: nvlink-5, nvlink-4, nvlink-3"),
        ("25", "a bandwidth that collectives reach"),
        ("0GB/s", "is no link"),
        ("9" * 400 + "GB/s", "is no link"),  # a float would be infinite
        ("", "is no link"),
        (25, "link must be text"),
        ("infiniband,pcie", "within a machine, then that between"),
        ("pcie,pcie", "within a machine, then that between"),
        ("pcie,infiniband,infiniband", "within a machine, then that between"),
    ],
)
def test_other_links_are_refused(text: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_link(text)


def test_a_link_is_between_several() -> None:
    assert parse_link(None, 0) == ""
    assert parse_link("8x25GB/s", 2) == "8x25GB/s"
    with pytest.raises(InputError, match="and there is one"):
        parse_link("pcie-4", 0)
    with pytest.raises(InputError, match="all GPUs are in one"):
        parse_link("8x25GB/s", 1)


@pytest.mark.parametrize("card", [gpu.name for gpu in all_gpus()])
def test_the_usual_link_of_each_card_can_be_given(card: str) -> None:
    usual = find_link(find_gpu(card), across_nodes=False)
    assert check_link(usual.name) in LINKS
    assert link(card, usual.name) == usual


def test_a_name_replaces_the_link_of_its_place_alone() -> None:
    usual = find_link(find_gpu("a100-80gb"), across_nodes=True)
    assert link("a100-80gb", "pcie", across_nodes=True) == usual
    assert link("a100-80gb", "8x50GB/s", across_nodes=True) == usual
    assert link("a100-80gb", "infiniband").name == "NVLink 3"
    assert link("rtx-4090", "nvlink-4") == link("h100-80gb", "nvlink-4")
    both = (
        link("a100-80gb", "pcie-3,8x25GB/s"),
        link("a100-80gb", "pcie-3,8x25GB/s", across_nodes=True),
    )
    assert [each.name for each in both] == ["PCIe 3", "8 x 25 GB/s between nodes"]


def test_a_bandwidth_is_what_large_collectives_reach() -> None:
    """Half of it takes twice as long where the payload is large, and no latency."""
    for across in (False, True):
        fast, slow = (
            link("a100-80gb", text, across_nodes=across)
            for text in ("50GB/s", "25GB/s")
        )
        assert reached(slow, 2**36) == pytest.approx(25)
        ratio = reached(fast) / reached(slow)
        assert ratio == pytest.approx(2, rel=0.02)
        small = reached(fast, SMALL) / reached(slow, SMALL)
        assert 1 <= small < 1.1
    halves = [link("a100-80gb", t, across_nodes=True) for t in ("8x50GB/s", "8x25GB/s")]
    assert reached(halves[0], 2**36) == pytest.approx(2 * reached(halves[1], 2**36))


@pytest.mark.parametrize("text", [*LINKS, "2GB/s", "1000GB/s", "1x10Gb/s", "16x50GB/s"])
@pytest.mark.parametrize("across_nodes", [False, True])
def test_more_never_takes_less_time(text: str, across_nodes: bool) -> None:
    found = link("a100-80gb", text, across_nodes=across_nodes)
    for reduces_all in (False, True):
        times = [
            found.time_ns(2.0**exponent, 8, reduces_all=reduces_all)
            for exponent in range(10, 36)
        ]
        assert times[0] > 0
        assert all(b >= a * (1 - 1e-12) for a, b in pairwise(times))
