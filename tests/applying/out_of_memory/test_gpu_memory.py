from dataclasses import replace

import torch

from budgetfit.applying.out_of_memory.error import read_gpu_memory
from budgetfit.core.allocator.out_of_memory_message import OutOfMemoryMessage

MIB, GIB = 2**20, 2**30
# c10/cuda/CUDACachingAllocator.cpp of torch 2.13.
CUDA = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of "
    "23.64 GiB of which 512.00 MiB is free. Process 4711 has 6.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 17.00 GiB memory in use. Of the "
    "allocated memory 15.00 GiB is allocated by PyTorch, and 1.25 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 4398046511104 bytes. Error code 12"
)


def test_the_text_of_the_error_is_read() -> None:
    card = read_gpu_memory(CUDA, torch.device("cpu"))
    assert card.requested_bytes == 1536 * MIB
    assert card.reserved_bytes == 15 * GIB + 1280 * MIB
    # What this process's allocator has, and what nobody has.
    assert card.usable_bytes == 15 * GIB + 1792 * MIB
    assert card.other_bytes(0) == round(23.64 * GIB) - 512 * MIB - 17 * GIB


def test_no_more_is_usable_than_a_memory_fraction_allows() -> None:
    text = CUDA.replace("Of the allocated", "16.00 GiB allowed; Of the allocated")
    card = read_gpu_memory(text, torch.device("cpu"))
    assert card.usable_bytes == 16 * GIB


def test_other_processes_are_what_is_left_without_the_context() -> None:
    card = OutOfMemoryMessage(
        kind="allocator",
        start=0,
        total_bytes=100,
        free_bytes=10,
        allocated_bytes=50,
        idle_bytes=10,
    )
    assert card.other_bytes(5) == 25
    assert card.other_bytes(50) == 0
    assert replace(card, free_bytes=None).other_bytes(5) is None


def test_a_text_without_numbers_leaves_them_unknown() -> None:
    card = read_gpu_memory("CUBLAS_STATUS_ALLOC_FAILED", torch.device("cpu"))
    assert card == OutOfMemoryMessage(kind="library", start=0)
    assert card.usable_bytes is None


def test_small_requests_are_read_in_their_unit() -> None:
    for text, size in (("20.00 MiB", 20 * MIB), ("2.00 KiB", 2048), ("512 bytes", 512)):
        card = read_gpu_memory(
            f"CUDA out of memory. Tried to allocate {text}.", torch.device("cpu")
        )
        assert card.requested_bytes == size
