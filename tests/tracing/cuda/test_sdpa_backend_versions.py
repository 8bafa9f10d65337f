"""Memory-efficient attention since torch 2.14. The numbers are the null driver's."""

import torch

from budgetfit.core.step_trace import KernelScratch
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import device_properties
from budgetfit.memory.scratch_sizes.rules import scratch_bytes
from budgetfit.tracing.cuda.kernel_memory.registry import Call, kernel_steps
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.fake.model_copy import fake_mode
from budgetfit.tracing.recording.storage_log import StorageLog

FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
OUT, SUMS = 8_388_608, 262_144
T4 = CudaTarget(compute_capability=(7, 5), torch_version=(2, 14))


def heads(count: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """2 samples, 1024 tokens, 64 numbers for each head."""
    return torch.empty(2, count, 1024, 64, dtype=dtype)


def forward_bytes(version: tuple[int, int], dropout: float) -> list[int]:
    """Return what the forward makes, in order; host memory has no bytes."""
    target = CudaTarget(compute_capability=(7, 5), torch_version=version)
    with fake_mode():
        x = heads(32)
        with StorageLog(CudaOpSemantics(target)) as log:
            out = FORWARD(x, x, x, None, True, dropout, False)
            born = [
                log.sizes[event - 1]
                for event in log.events
                if event > 0 and event - 1 not in log.scratch  # of further launches
            ]
        del out
    return born


def test_without_dropout_seed_and_offset_are_on_the_card_and_come_first() -> None:
    assert forward_bytes((2, 14), 0.0) == [8, 8, OUT, SUMS]
    assert forward_bytes((2, 14), 0.1) == [0, 0, OUT, SUMS]
    assert forward_bytes((2, 13), 0.0) == [0, 0, OUT, SUMS]


def backward_bytes(key_heads: int, dtype: torch.dtype) -> list[int]:
    """Return what the backward takes besides its results, in order."""
    with fake_mode():
        x, key = heads(32, dtype), heads(key_heads, dtype)
        turned = x.transpose(1, 2).contiguous().transpose(1, 2)
        numbers = None, x, x, x, x, 0.0, [True] * 4, False
        args = (turned, x, key, key, *numbers)
        steps = kernel_steps(Call(BACKWARD, args, {}, None, T4))
    card = device_properties(find_gpu("t4"))
    sizes = (
        scratch_bytes(card, step.rule, step.arguments)[step.part]
        for step in steps
        if isinstance(step, KernelScratch)
    )
    return [size for size in sizes if size]  # there are no further launches


def test_grouped_heads_get_a_gradient_for_each_query_head_first() -> None:
    alone, shared = backward_bytes(32, torch.float16), backward_bytes(4, torch.float16)
    assert alone == [SUMS, 16_793_600]
    assert shared == [OUT, OUT, *alone]
    single = [2 * OUT, SUMS, SUMS, 16_793_600]
    assert backward_bytes(4, torch.float32) == [2 * OUT, 2 * OUT, *single]
