from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.core.allocator.out_of_memory_message import (
    OutOfMemoryMessage,
    own_process,
    parse_out_of_memory,
    strip_formatting,
)
from tests.explain import messages

MIB, GIB = 2**20, 2**30


def read(text: str) -> OutOfMemoryMessage:
    [message] = parse_out_of_memory(strip_formatting(text))
    return message


def numbers(message: OutOfMemoryMessage) -> tuple[Any, ...]:
    """Requested, total, free, allocated, idle, in MiB."""
    sizes = (
        message.requested_bytes,
        message.total_bytes,
        message.free_bytes,
        message.allocated_bytes,
        message.idle_bytes,
    )
    return tuple(None if size is None else round(size / MIB, 2) for size in sizes)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # Up to 1.3 "cached" is what is reserved and in no tensor.
        (messages.TORCH_1_0, (12.5, 11182.08, 9502.72, 8.57, 4.68)),
        # From 1.4 on both are: 14.80 - 13.13 GiB.
        (messages.TORCH_1_5, (512, 16281.6, 415.88, 13445.12, 1710.08)),
        (messages.TORCH_2_1, (10321.92, 22732.8, 687.12, 9943.04, 10864.64)),
        (messages.ROCM, (2, 262123.52, 250521.6, 1017.01, 54.99)),
        (messages.TORCH_2_13, (6103.04, 24207.36, 3317.76, 20889.6, 5.44)),
        (messages.ASYNC, (2, 24565.76, 0, 10311.68, None)),
    ],
)
def test_every_wording_gives_its_numbers(text: str, wanted: tuple[float, ...]) -> None:
    assert numbers(read(text)) == wanted


def test_the_card_the_limit_and_the_pools_are_read() -> None:
    assert read(messages.TORCH_1_5).device == 1
    limited = read(messages.ROCM)
    assert limited.allowed_bytes == round(1.05 * GIB)
    assert limited.pools_bytes == 17 * MIB
    assert limited.on_amd
    assert read(messages.ASYNC).allowed_bytes is None  # the largest number is no limit
    assert read(messages.EXABYTE).requested_bytes == 2**60


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (messages.FULL, "allocator"),
        (messages.DRIVER, "driver"),
        (messages.LIBRARY, "library"),
        ("cuda runtime error (2) : out of memory at /x/THCStorage.cu:66", "driver"),
        ("ncclInternalError: Failed to CUDA calloc 6291456 bytes", "library"),
    ],
)
def test_errors_past_the_allocator_are_known_too(text: str, kind: str) -> None:
    assert read(text).kind == kind


def test_the_hosts_message_says_what_it_was_asked_for() -> None:
    message = read(messages.HOST)
    assert (message.kind, message.requested_bytes) == ("host", 2**42)


def test_others_and_this_process_are_told_apart() -> None:
    own, others = own_process(read(messages.TORCH_2_9))
    assert own == round(37.46 * GIB)
    assert others == tuple(
        (pid, 414 * MIB) for pid in (3721648, 1374765, 1374763, 1374764)
    )


def test_in_a_container_the_numbered_process_that_is_large_enough_is_this_one() -> None:
    assert own_process(read(messages.TORCH_2_1)) == (round(21.53 * GIB), [])
    # 9 GiB are reserved: process 2 cannot be this one.
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "16.00 GiB of which 1.00 GiB is free. Process 1 has 10.00 GiB memory in use. "
        "Process 2 has 5.00 GiB memory in use. Of the allocated memory 8.00 GiB is "
        "allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    )
    assert own_process(read(text)) == (10 * GIB, [(2, 5 * GIB)])


def test_numbers_longer_than_python_reads_are_not_taken_for_any() -> None:
    long = "9" * 5000
    message = read(messages.TORCH_2_9.replace("GPU 0", f"GPU {long}"))
    assert message.device is None
    assert message.total_bytes == round(39.49 * GIB)
    message = read(messages.TORCH_2_9.replace("Process 1374763", f"Process {long}"))
    assert [pid for pid, _ in message.others] == [3721648, 1374765, 1374764]
    assert read(messages.HOST.replace("4398046511104", long)).requested_bytes is None


def test_a_message_is_read_through_boxes_colours_ranks_and_breaks() -> None:
    plain = read(messages.FULL)
    words = messages.FULL.split(" ")
    wrapped = "\n".join(
        f"[rank3]: \u2502 {' '.join(words[i : i + 6])} \u2502"
        for i in range(0, len(words), 6)
    )
    for text in (
        wrapped,
        f"\x1b[31m{messages.FULL}\x1b[0m",
        wrapped.replace("\n", "\r\n"),
    ):
        assert numbers(read(text)) == numbers(plain)


def test_a_log_of_json_lines_is_read() -> None:
    text = f'{{"text": "Traceback\\n  File \\"a.py\\", line 3\\n{messages.FULL}\\n"}}'
    assert numbers(read(text)) == numbers(read(messages.FULL))


def test_each_message_of_a_text_is_read_in_order() -> None:
    found = parse_out_of_memory("\n".join(messages.ALL))
    assert len(found) == len(messages.ALL)
    assert [m.start for m in found] == sorted(m.start for m in found)
    assert parse_out_of_memory("") == ()


@given(
    st.lists(st.integers(0, 10**6), min_size=4, max_size=4),
    st.lists(st.integers(1, 10**5), max_size=3),
)
def test_what_torch_writes_is_what_is_read(sizes: list[int], others: list[int]) -> None:
    def size(mib: int) -> str:
        return f"{mib}.00 MiB"

    requested, total, allocated, idle = sizes
    processes = "".join(
        f"Process {pid} has {size(mib)} memory in use. "
        for pid, mib in enumerate(others, 100)
    )
    text = (
        f"x CUDA out of memory. Tried to allocate {size(requested)}. GPU 3 has a total "
        f"capacity of {size(total)} of which 0 bytes is free. {processes}Including "
        f"non-PyTorch memory, this process has {size(idle)} memory in use. Of the "
        f"allocated memory {size(allocated)} is allocated by PyTorch, and {size(idle)} "
        "is reserved by PyTorch but unallocated."
    )
    message = read(text)
    assert numbers(message) == (requested, total, 0, allocated, idle)
    assert message.others == tuple(
        (pid, mib * MIB) for pid, mib in enumerate(others, 100)
    )


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    for start in (
        "CUDA out of memory. Tried",
        "CUDA out of memory. Tried to allocate ",
    ):
        parse_out_of_memory(strip_formatting(f"{start}{text}"))
