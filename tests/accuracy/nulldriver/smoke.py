"""The least that a null driver must do; run it under ``run.py`` on a card of 1 GiB.

    python -m tests.accuracy.nulldriver.run --gpu t4 --memory-gib 1 -- \\
        python -m tests.accuracy.nulldriver.smoke

Every expected number follows from shapes alone: 2^20 fp32 numbers are 4 MiB.
"""

import os
import sys
from typing import Final

import torch

MIB: Final = 2**20
GIB: Final = 2**30


def check_the_card() -> None:
    """The device is the null driver's, with the numbers of the imitated card."""
    card = torch.cuda.get_device_properties(0)
    assert card.name == "NullCUDA", f"{card.name} is not the null driver"
    assert 10 * card.major + card.minor == int(os.environ["NULLCUDA_CC"])
    assert card.multi_processor_count == int(os.environ["NULLCUDA_SM"])
    threads = int(os.environ["NULLCUDA_THREADS_PER_SM"])
    assert card.max_threads_per_multi_processor == threads
    assert card.total_memory == GIB


def check_a_training_step() -> None:
    """Weights, gradients and two states of 4 MiB each, and a step counter of 512 B."""
    weight = torch.nn.Parameter(torch.empty(1024, 1024, device="cuda"))
    optimizer = torch.optim.AdamW([weight], fused=True)
    assert torch.cuda.memory_allocated() == 4 * MIB
    output = weight * weight  # an input is saved, an output of 4 MiB made
    assert torch.cuda.memory_allocated() == 8 * MIB
    output.backward(torch.empty_like(output))
    del output
    assert torch.cuda.memory_allocated() == 8 * MIB
    optimizer.step()
    assert torch.cuda.memory_allocated() == 16 * MIB + 512
    optimizer.zero_grad(set_to_none=True)
    assert torch.cuda.memory_allocated() == 12 * MIB + 512
    assert torch.cuda.memory_reserved() == 22 * MIB  # a segment of 20 and a small one


def check_kernels() -> None:
    """A matrix product (cuBLAS), a sort (CUB), a kernel that is compiled on the spot.

    The compiler in the wheel refuses cards that are older than the wheel's own kernels.
    """
    square = torch.empty(1024, 1024, device="cuda", requires_grad=True)
    (square @ square).sum().backward()
    square.detach().flatten().sort()
    compiled = [int(arch.removeprefix("sm_")) for arch in torch.cuda.get_arch_list()]
    if int(os.environ["NULLCUDA_CC"]) >= min(compiled):
        torch.empty(8, device="cuda").erfinv_()
    torch.cuda.synchronize()
    assert torch.ones(1, device="cuda").item() == 0  # nothing was computed


def check_host_memory() -> None:
    """Page-locked memory is told from other memory."""
    assert torch.empty(1024, pin_memory=True).is_pinned()
    assert not torch.empty(1024).is_pinned()


def check_running_out() -> None:
    """The allocator first gives back what it has cached, then refuses."""
    torch.cuda.empty_cache()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    first = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
    del first  # now cached
    second = torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1
    assert "600.00 MiB" in message_when_asked_for(600 * MIB)
    assert second.numel() == 700 * MIB


def message_when_asked_for(size_bytes: int) -> str:
    """What PyTorch says when so much does not fit."""
    try:
        torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return str(error)
    return "it fitted"


def main() -> int:
    """Every check; an AssertionError names the first that fails."""
    check_the_card()
    check_a_training_step()
    check_kernels()
    check_host_memory()
    check_running_out()
    print(f"smoke: torch {torch.__version__} on {os.environ['NULLCUDA_GPU']}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
