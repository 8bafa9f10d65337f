"""Roofline model: the time of each op of a trace from its FLOPs and bytes.

An op takes as long as the slowest of three: its floating-point operations at the GPU's
rate for their dtype, the bytes it moves at the GPU's memory bandwidth, and its launch.
Plans are ranked by these times, so that ratios matter; absolute times are estimates
until ``verify`` has measured a step.
"""

from collections.abc import Collection
from typing import Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import RATES, Phase, PhaseName, StepTrace
from budgetfit.gpus.table import Gpu

Nanoseconds = NDArray[np.float64]

# Share of the data sheet's matrix rate. The best shapes reach 0.86 (A100), 0.80 (H100)
# and 0.78 (B200): "maximum achievable matmul FLOPS", github.com/stas00/ml-engineering,
# compute/accelerator. A model's own shapes reach less; whole steps do well with 0.5.
MATRIX_SHARE: Final = 0.6
# Share of the data sheet's bandwidth: STREAM-like kernels reach 0.9 to 0.92 on H100
# (3.08 of 3.35 TB/s), op by op somewhat less.
BANDWIDTH_SHARE: Final = 0.85
# Share of the bus rate: pinned copies are commonly measured at 12 to 13 of PCIe 3.0's
# 15.75 GB/s and 24 to 26 of PCIe 4.0's 31.5 (CUDA's bandwidthTest sample).
LINK_SHARE: Final = 0.8
SLOWEST_LINK: Final = 15.75  # PCIe 3.0 x16, where a card's link is not known
# Dispatch and launch of one op from Python, measured at about 4 microseconds on an H100
# host: a lower bound for each op.
LAUNCH_NS: Final = 4_000.0
# The same under torch's selective checkpointing, whose dispatch mode runs Python for
# each op: 4 microseconds became 25 in the forward, 9 became 21 when run again (120
# small ops on a CPU, torch 2.13; no GPU is needed to issue ops).
SELECTIVE_LAUNCH_NS: Final = 20_000.0
# fp64 results per fp32 one, by compute capability (CUDA C++ Programming Guide,
# throughput of native arithmetic instructions): one half on data-center cards.
_FP64_SHARES: Final = {
    **dict.fromkeys([(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)], 1 / 2),
    **dict.fromkeys([(6, 1), (7, 5)], 1 / 32),
}
_OTHER_FP64_SHARE: Final = 1 / 64
_HOST: Final = RATES.index("host")


class StepTime(NamedTuple):
    """Times of one micro-batch's forward and backward, and of one optimizer step."""

    forward_ns: int
    backward_ns: int
    optimizer_ns: int

    def total_ns(self, gradient_accumulation_steps: int = 1) -> int:
        """Return the time of a whole step of so many micro-batches."""
        micro_batch_ns = self.forward_ns + self.backward_ns
        return micro_batch_ns * gradient_accumulation_steps + self.optimizer_ns


def op_times_ns(
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    *,
    tf32: bool,
    selective_blocks: Collection[str] = (),
) -> Nanoseconds:
    """Return the time of each op in nanoseconds, in the order of ``trace.ops``.

    Args:
        trace: The step; its arithmetic is affine in the batch size.
        batch_size: Samples per micro-batch.
        gpu: Gives the rates and the bandwidth.
        tf32: Whether fp32 matrix products run on tf32 tensor cores, if there are any.
        selective_blocks: Names of blocks under selective checkpointing.
    """
    ops = trace.ops
    flops = ops.flops_fixed + ops.flops_per_sample * batch_size
    moved = ops.bytes_fixed + ops.bytes_per_sample * batch_size
    flops_per_ns = np.array([_flops_per_ns(gpu, rate, tf32=tf32) for rate in RATES])
    # 10^9 bytes per second are one byte per nanosecond.
    bytes_per_ns = np.full(len(RATES), gpu.memory_gb_per_s * BANDWIDTH_SHARE)
    bytes_per_ns[_HOST] = (gpu.link_gb_per_s or SLOWEST_LINK) * LINK_SHARE
    arithmetic_ns = flops / flops_per_ns[ops.rate]
    slowest: Nanoseconds = np.maximum(arithmetic_ns, moved / bytes_per_ns[ops.rate])
    launch_ns = np.full(slowest.size, LAUNCH_NS)
    for each in trace.passes if selective_blocks else ():
        if trace.block_names[each.block] in selective_blocks:
            launch_ns[_ops_between(trace, each.start, each.end)] = SELECTIVE_LAUNCH_NS
    times_ns: Nanoseconds = np.maximum(slowest, launch_ns)
    return times_ns


def interval_ns(trace: StepTrace, times_ns: Nanoseconds, start: int, end: int) -> int:
    """Return the time of the ops between two event positions, in whole nanoseconds.

    An op belongs to the interval in which its outputs are allocated, as counted by
    ``trace.ops.event``. Neighbouring intervals share no op. Copies to and from the host
    overlap with kernels: the slower of the two streams decides, and the last copy
    overlaps with nothing.

    Args:
        trace: The step.
        times_ns: What ``op_times_ns`` returned for it.
        start: Event position at which the interval begins, as in ``Phase``.
        end: Event position after it.
    """
    here = _ops_between(trace, start, end)
    inside = times_ns[here]
    copies = inside[trace.ops.rate[here] == _HOST]
    if not copies.size:
        return round(float(inside.sum()))
    kernels = float(inside.sum() - copies.sum())
    return round(max(kernels, float(copies[:-1].sum())) + float(copies[-1]))


def step_time_ns(trace: StepTrace, times_ns: Nanoseconds) -> StepTime:
    """Return the times of the last micro-batch and of the last optimizer step.

    Args:
        trace: The step.
        times_ns: What ``op_times_ns`` returned for it.
    """
    found = dict.fromkeys(get_args(PhaseName), 0)
    for name in found:
        phases = [phase for phase in trace.phases if phase.name == name]
        last = max(((phase.step, phase.micro_step) for phase in phases), default=None)
        found[name] = sum(
            _phase_ns(trace, times_ns, phase)
            for phase in phases
            if (phase.step, phase.micro_step) == last
        )
    return StepTime(found["forward"], found["backward"], found["optimizer"])


def _ops_between(trace: StepTrace, start: int, end: int) -> slice:
    """Return the ops of the interval between two event positions."""
    first, last = np.searchsorted(trace.ops.event, [start, end], side="right")
    return slice(int(first), int(last))


def _phase_ns(trace: StepTrace, times_ns: Nanoseconds, phase: Phase) -> int:
    """Return a phase's time: its blocks and the ops between them, in sequence.

    The compute stream waits for host copies at the boundaries of each block.
    """
    total, position = 0, phase.start
    for each in sorted(trace.passes, key=lambda row: row.start):
        if phase.start <= each.start and each.end <= phase.end:
            total += interval_ns(trace, times_ns, position, each.start)
            total += interval_ns(trace, times_ns, each.start, each.end)
            position = each.end
    return total + interval_ns(trace, times_ns, position, phase.end)


def _flops_per_ns(gpu: Gpu, rate: str, *, tf32: bool) -> float:
    """Return the achieved rate of a dtype's arithmetic, in operations per nanosecond.

    Where a card has no tensor cores for a dtype (bf16 before capability 8.0 is
    emulated) or its rate is unknown, that is the plain fp32 rate.
    """
    tensor_cores = {
        "fp32": gpu.tf32_tflops if tf32 else None,
        "fp16": gpu.fp16_tflops,
        "bf16": gpu.bf16_tflops,
    }
    tflops = tensor_cores.get(rate) or gpu.fp32_tflops
    if rate == "fp64":
        tflops *= _FP64_SHARES.get(gpu.compute_capability, _OTHER_FP64_SHARE)
    return tflops * 1e3 * MATRIX_SHARE
