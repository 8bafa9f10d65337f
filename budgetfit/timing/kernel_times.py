"""The time of each op of a trace, and of a training step.

A kernel takes ``t0 + flops / (share * rate) + bytes / (share * bandwidth)``: what its
launch takes on the GPU, and its arithmetic and memory traffic one after the other. That
they add up, and not the slower one decides, is what measured matrix products show
(35,742 of them for each of six GPUs, aiconfigurator: median error 4 to 9 % against 8 to
26 % for the slower one alone). The shares are a GPU's (``gpus.kernel_shares``) times
those of the kind of op (``kind_shares``).

The host issues kernels at its own pace. Where that takes longer than the kernels
themselves, the GPU waits for it.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import lru_cache
from math import log2
from operator import mul
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import (
    FUSED_KERNEL,
    HOST_STATE,
    OP_KINDS,
    RATES,
    SHARD_TO_DEVICE,
    SHARD_TO_HOST,
    OpKind,
    Phase,
    PhaseName,
    StepTrace,
)
from budgetfit.gpus.kernel_shares import RateShares, find_shares
from budgetfit.gpus.table import Gpu
from budgetfit.timing.kind_shares import KIND_SHARES, KindShares

Nanoseconds = NDArray[np.float64]

# Launch and drain of a product: 2.3 (L40S) to 5.6 microseconds (A100) in fits of
# aiconfigurator's timings; other kernels take less.
PRODUCT_NS: Final = 4_000.0
KERNEL_NS: Final = 2_400.0
# The host's time to issue one kernel from Python, by phase: autograd's backward is C++,
# and optimizers on tensor lists issue few kernels. A BERT layer of 128 tokens and two
# samples takes 22 microseconds a kernel, T5 layers 25 (mli/transformers-benchmarks),
# steps of T5-base 14 (the same for 1 to 16 samples; huggingface/transformers#14608).
ISSUE_NS: Final = {"forward": 21_000.0, "backward": 17_000.0, "optimizer": 13_000.0}
# What Python does besides where a block is not kept, measured on the null driver, which
# launches nothing (torch 2.11; GPT-2, BERT, Llama, ViT, plain modules). A kernel of a
# kept block takes 8 to 16 microseconds of the forward there, 7 to 9 of the backward:
# what ``ISSUE_NS`` has more is the launch.
# A checkpoint, in its forward and again in its backward; and in both, for each kernel
# that it runs again, the hooks of its saved tensors.
CHECKPOINT_NS: Final = 200_000.0
RECOMPUTED_NS: Final = 10_000.0
# A kernel under torch's selective checkpointing: its dispatch mode runs Python for each
# op, and for views too.
SELECTIVE_NS: Final = 42_000.0
# A call of a block that is compiled for itself, beside its kernels: guards, and what
# autograd wraps around the generated code (GPT-2, BERT and ViT: 0.10 to 0.30 ms of the
# forward, 0 to 0.19 of the backward, each).
COMPILED_NS: Final = {"forward": 200_000.0, "backward": 120_000.0}
# A copy of a saved tensor to the host, and back.
COPY_NS: Final = {"forward": 110_000.0, "backward": 58_000.0}
# Share of the bus rate: pinned copies are commonly measured at 12 to 13 of PCIe 3.0's
# 15.75 GB/s and 24 to 26 of PCIe 4.0's 31.5 (CUDA's bandwidthTest sample).
LINK_SHARE: Final = 0.8
SLOWEST_LINK: Final = 15.75  # PCIe 3.0 x16, where a GPU's link is not known
# Of an optimizer on the CPU. One thread, which is what torchrun gives each rank, moves
# 25 in PyTorch's fused AdamW on an EPYC, alone; ranks share the memory of a machine.
CPU_BYTES_PER_NS: Final = 10.0
# fp64 results per fp32 one, by compute capability (CUDA C++ Programming Guide,
# throughput of native arithmetic instructions): one half on data-center GPUs.
_FP64_SHARES: Final = {
    **dict.fromkeys([(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)], 1 / 2),
    **dict.fromkeys([(6, 1), (7, 5)], 1 / 32),
}
_OTHER_FP64_SHARE: Final = 1 / 64
# Winograd's algorithm does 3x3 convolutions in fp32 in fewer operations: 1.5 to 1.7
# of the direct ones on a V100 (DeepBench).
WINOGRAD: Final = 1.6
# FlashAttention-2, which PyTorch has built in, takes no advantage of Hopper's own
# instructions: about half of the rate of cuDNN's kernels (FlashAttention-3's figures;
# 0.60 in the median of an H100's ops), memory-efficient attention 0.3 of it (the
# same; ``python -m benchmarks.kernel_times``).
HOPPER: Final = (9, 0)
ON_HOPPER: Final = {"flash": 0.54, "efficient": 0.3}
# In fp32 memory-efficient attention computes outside the setting for TF32 (on an H100
# the same time with and without), and its backward pass at the rate of the forward.
FP32_ATTENTION_BACKWARD: Final = (
    KIND_SHARES["efficient_attention"].rate
    / KIND_SHARES["efficient_attention_backward"].rate
)
# A batch norm with channels first has a thread block per channel, with 512 threads. In
# PyTorch's own kernels each waits for one value at a time, 2 KiB in flight at half a
# microsecond: so many bytes per nanosecond and block are moved on an H100 (the same).
# In cuDNN's, one block to a multiprocessor, each waits for a vector of 16 bytes: four
# times as many, which fills a multiprocessor of all GPUs but those with most bandwidth.
PLAIN_BLOCK: Final = 4.5
VECTOR_BLOCK: Final = 18.0
# Elements that a multiprocessor takes per nanosecond in PyTorch's elementwise kernels
# without vector loads: each is found by divisions, or cast by a look at its dtype, so
# that bytes do not count. Casts from bf16 to fp32 and copies of transposed tensors on
# an H100 (the same), 2.2 to 2.7.
ELEMENTS_PER_SM: Final = 2.5
# Nodes wait for the slowest in each step: with each doubling of their number it takes
# so much longer. llm-foundry's MPT-760m and MPT-7b on 2 to 64 nodes ask for 0.012 on
# A100s and 0.013 on H100s (``python -m benchmarks.published_steps.scaling``).
PER_DOUBLED_NODES: Final = 0.012
_TRACES: Final = 16  # of which it is remembered where their ops are
_COPY: Final = OP_KINDS.index("host")
_BESIDE_KERNELS: Final = (SHARD_TO_HOST, SHARD_TO_DEVICE, HOST_STATE)
_CPU: Final = OP_KINDS.index("cpu")
_ELEMENTS: Final = RATES.index("elements")
_PLAIN_BATCH_NORM: Final = OP_KINDS.index("plain_batch_norm")
PHASES: Final[tuple[PhaseName, ...]] = ("forward", "backward", "optimizer")


class StepTime(NamedTuple):
    """Times of one micro-batch's forward and backward, and of one optimizer step."""

    forward_ns: int
    backward_ns: int
    optimizer_ns: int

    def total_ns(self, gradient_accumulation_steps: int = 1) -> int:
        """Return the time of a whole step of so many micro-batches."""
        micro_batch_ns = self.forward_ns + self.backward_ns
        return micro_batch_ns * gradient_accumulation_steps + self.optimizer_ns


class OpWork(NamedTuple):
    """What ops ask of a GPU at one batch size; an array of each.

    ``kind``, ``rate``, ``kernels`` and ``blocks`` are as in ``OpTable``, ``flops`` the
    operations (or elements, by ``rate``) divided by their efficiency.
    """

    kind: NDArray[np.int8]
    rate: NDArray[np.int8]
    kernels: NDArray[np.integer[Any]]
    flops: NDArray[np.float64]
    moved_bytes: NDArray[np.float64]
    blocks: NDArray[np.integer[Any]]

    @classmethod
    def of(cls, trace: StepTrace, batch_size: int) -> "OpWork":
        """Return the work of all ops of a trace."""
        ops = trace.ops
        return cls(
            ops.kind,
            ops.rate,
            ops.kernels,
            (ops.flops_fixed + ops.flops_per_sample * batch_size) / ops.efficiency,
            ops.bytes_fixed + ops.bytes_per_sample * batch_size,
            ops.blocks,
        )


class OpTimes(NamedTuple):
    """Nanoseconds of the ops of a trace, in the order of ``trace.ops``.

    Attributes:
        times_ns: What each takes: its kernels, or what the host needs to issue them.
        kernels_ns: What its kernels take on the GPU.
        waiting: How many of the first phases take what the host needs.
    """

    times_ns: Nanoseconds
    kernels_ns: Nanoseconds
    waiting: int

    @property
    def host_bound(self) -> bool:
        """Whether a phase takes what the host needs."""
        return self.waiting > 0


def op_times(  # noqa: PLR0913 - one value each, all needed
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    *,
    tf32: bool,
    selective_blocks: Collection[str] = (),
    micro_steps: int = 1,
    nodes: int = 1,
    waiting: int | None = None,
) -> OpTimes:
    """Return the times of all ops of a trace; they are not to be changed.

    Args:
        trace: The step; what it asks of the GPU is affine in the batch size.
        batch_size: Samples per micro-batch.
        gpu: Gives the rates and the bandwidth.
        tf32: Whether fp32 matrix products run on tf32 tensor cores, if there are any.
        selective_blocks: Names of blocks under selective checkpointing.
        micro_steps: Micro-batches in each step.
        nodes: Machines that train together; their kernels take longer by what each
            waits for the slowest.
        waiting: How many of the first phases take what the host needs; None: so many
            that the step takes longest, as it does.
    """
    selective = frozenset(selective_blocks)
    own = _op_times(trace, batch_size, gpu, tf32, selective, micro_steps, nodes)
    if waiting is None or waiting == own.waiting:
        return own
    issue_ns = _host_ns(trace, gpu, selective, own.kernels_ns)
    times_ns = _with_waiting(trace, own.kernels_ns, issue_ns, waiting)
    return OpTimes(times_ns, own.kernels_ns, waiting)


@lru_cache(maxsize=8)
def _op_times(  # noqa: PLR0913, PLR0917 - as of ``op_times``
    trace: StepTrace,
    batch_size: int,
    gpu: Gpu,
    tf32: bool,
    selective_blocks: frozenset[str],
    micro_steps: int,
    nodes: int,
) -> OpTimes:
    exchanges = collectives(trace)
    kernels_ns = kernel_times_ns(
        OpWork.of(trace, batch_size), gpu, tf32=tf32, together=bool(exchanges.any())
    )
    kernels_ns *= 1 + PER_DOUBLED_NODES * log2(nodes)
    kernels_ns[exchanges] = 0.0  # beside the kernels: ``timing.collectives``
    issue_ns = _host_ns(trace, gpu, selective_blocks, kernels_ns)
    is_copy = trace.ops.kind == _COPY
    on_gpu = np.where(is_copy, 0.0, kernels_ns)
    last = last_ops(trace)
    waiting = phases_waiting(
        [float(on_gpu[last[name]].sum()) for name in PHASES],
        [float(issue_ns[last[name]].sum()) for name in PHASES],
        micro_steps,
    )
    times_ns = _with_waiting(trace, kernels_ns, issue_ns, waiting)
    return OpTimes(times_ns, kernels_ns, waiting)


def _with_waiting(
    trace: StepTrace, kernels_ns: Nanoseconds, issue_ns: Nanoseconds, waiting: int
) -> Nanoseconds:
    """Return the times where so many of the first phases wait for the host."""
    times_ns = kernels_ns.copy()
    for name in PHASES[:waiting]:
        of_phase = _in_phase(trace)[name] & (trace.ops.kind != _COPY)
        times_ns[of_phase] = issue_ns[of_phase]
    return times_ns


def kernel_times_ns(
    work: OpWork,
    gpu: Gpu,
    *,
    tf32: bool,
    kinds: Mapping[OpKind, KindShares] = KIND_SHARES,
    together: bool = False,
) -> Nanoseconds:
    """Return what the kernels of each op take on the GPU, in nanoseconds.

    ``together``: the GPU trains with others.
    """
    if kinds is KIND_SHARES:
        rates = _usual_rates(gpu, tf32, together)
    else:
        rates = _Rates.of(gpu, tf32=tf32, kinds=kinds, together=together)
    bytes_per_ns = rates.bytes_per_ns[work.kind]
    moved_ns = work.moved_bytes / np.minimum(
        bytes_per_ns, _of_blocks(work, gpu, bytes_per_ns)
    )
    times_ns: Nanoseconds = (
        rates.launch_ns[work.kind] * work.kernels
        + work.flops / rates.flops_per_ns[work.kind, work.rate]
        + np.maximum(moved_ns, elements_ns(work, gpu))
    )
    return times_ns


def elements_ns(work: OpWork, gpu: Gpu) -> Nanoseconds:
    """Return what elements take that threads load one by one, whatever the bytes."""
    elements = np.where(work.rate == _ELEMENTS, work.flops, 0.0)
    times_ns: Nanoseconds = elements / (ELEMENTS_PER_SM * gpu.sm_count)
    return times_ns


class _Rates(NamedTuple):
    """A GPU's rates, and what a launch takes, by kind of op (and rate, for flops)."""

    flops_per_ns: NDArray[np.float64]
    bytes_per_ns: NDArray[np.float64]
    launch_ns: NDArray[np.float64]

    @classmethod
    def of(
        cls, gpu: Gpu, *, tf32: bool, kinds: Mapping[OpKind, KindShares], together: bool
    ) -> "_Rates":
        """Return a GPU's rates."""
        shares = find_shares(gpu, together=together)
        flops_per_ns = np.array(
            [
                [
                    _flops_per_ns(gpu, shares, kind, rate, tf32=tf32)
                    * (kinds[kind].rate or 1.0)
                    for rate in RATES
                ]
                for kind in OP_KINDS
            ]
        )
        # 10^9 bytes per second are one byte per nanosecond.
        bytes_per_ns = (
            gpu.memory_gb_per_s
            * shares.bandwidth
            * np.array([kinds[kind].bandwidth for kind in OP_KINDS])
        )
        bytes_per_ns[_COPY] = host_bytes_per_ns(gpu)
        bytes_per_ns[_CPU] = CPU_BYTES_PER_NS
        launch_ns = np.array(
            [PRODUCT_NS if kinds[kind].rate else KERNEL_NS for kind in OP_KINDS]
        )
        without_rate = [OP_KINDS.index(k) for k, v in kinds.items() if not v.rate]
        flops_per_ns[without_rate] = np.inf
        return cls(flops_per_ns, bytes_per_ns, launch_ns)


@lru_cache(maxsize=_TRACES)
def _usual_rates(gpu: Gpu, tf32: bool, together: bool) -> _Rates:
    return _Rates.of(gpu, tf32=tf32, kinds=KIND_SHARES, together=together)


def is_exchange(name: str) -> bool:
    """Whether an op is a collective, or copies shards to the host or from there."""
    return name.startswith("c10d.") or name in _BESIDE_KERNELS


@lru_cache(maxsize=_TRACES)
def collectives(trace: StepTrace) -> NDArray[np.bool_]:
    """Return which ops are collectives, or copy shards to the host and back."""
    named = np.array([is_exchange(name) for name in trace.op_names], np.bool_)
    return named[trace.ops.name] if named.any() else np.zeros(len(trace.ops.name), bool)


def _of_blocks(
    work: OpWork, gpu: Gpu, bytes_per_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the bytes per nanosecond that the thread blocks of kernels can move."""
    limits = np.full(len(work.blocks), np.inf)
    few = np.flatnonzero(work.blocks)
    # Of a kernel with fewer of them than the GPU has multiprocessors, each moves bytes
    # at the rate of one multiprocessor, or its own.
    blocks = work.blocks[few]
    full = np.minimum(bytes_per_ns[few] / gpu.sm_count, VECTOR_BLOCK)
    limits[few] = np.where(
        work.kind[few] == _PLAIN_BATCH_NORM,
        blocks * PLAIN_BLOCK,
        np.minimum(blocks, gpu.sm_count) * full,
    )
    return limits


def phases_waiting(
    kernels_ns: list[float], issue_ns: list[float], micro_steps: int = 1
) -> int:
    """Return how many of the first phases take what the host needs to issue them.

    The host runs ahead of the GPU where kernels are long, over the end of a phase too,
    and never behind it. So a step lasts until the host has issued some first phases and
    the GPU has run the kernels of the others: the longest of these.

    Args:
        kernels_ns: The kernels of each phase, in the order in which phases run.
        issue_ns: The host's time to issue them.
        micro_steps: How often all phases but the last run in a step.
    """
    # An optimizer that keeps the GPU waiting for a moment says nothing about a hundred
    # micro-batches.
    times = [micro_steps] * (len(issue_ns) - 1) + [1]
    ends = [
        sum(map(mul, times, [*issue_ns[:count], *kernels_ns[count:]]))
        for count in range(len(issue_ns) + 1)
    ]
    return ends.index(max(ends))


def _host_ns(
    trace: StepTrace,
    gpu: Gpu,
    selective_blocks: frozenset[str],
    kernels_ns: Nanoseconds,
) -> Nanoseconds:
    """Return the host's time: to issue the kernels of each op, or to run it itself."""
    issue_ns = find_shares(gpu).host * _issue_ns(trace, selective_blocks)
    return np.where(trace.ops.kind == _CPU, kernels_ns, issue_ns)


@lru_cache(maxsize=_TRACES)
def _issue_ns(trace: StepTrace, selective_blocks: frozenset[str]) -> Nanoseconds:
    """Return a workstation's time to issue the kernels of each op."""
    # What a checkpoint, the copies or the compiled code of a block take is shared by
    # the kernels around.
    kernels, recomputed = trace.ops.kernels, trace.ops.recomputed
    compiled = np.array([name == FUSED_KERNEL for name in trace.op_names], np.bool_)
    compiled = compiled[trace.ops.name]
    kernel_ns = np.zeros(len(kernels))
    for name in PHASES:
        kernel_ns[_in_phase(trace)[name]] = ISSUE_NS[name]
    kernel_ns[recomputed] = ISSUE_NS["forward"]  # from Python, too
    forwards: dict[tuple[int, int, int], list[NDArray[np.int64]]] = defaultdict(list)
    for each in trace.passes:
        here = _ops_between(trace, each.start, each.end)
        is_copy = trace.ops.kind[here] == _COPY
        copies, here = here[is_copy], here[~is_copy]
        if copies.size and kernels[here].any():
            kernel_ns[copies] = 0.0
            kernel_ns[here] += (
                COPY_NS[each.direction] * copies.size / kernels[here].sum()
            )
        if compiled[here].any():
            calls_ns = COMPILED_NS[each.direction]
            if each.direction == "backward" and recomputed[here].any():
                calls_ns += COMPILED_NS["forward"]
            kernel_ns[here] += calls_ns / kernels[here].sum()
        run = forwards[each.block, each.step, each.micro_step]
        if each.direction == "forward":
            run.append(here)
            continue
        forward, again = run.pop() if run else here[:0], here[recomputed[here]]
        count = kernels[again].sum()
        if not count:
            continue
        checkpoint_ns = CHECKPOINT_NS + RECOMPUTED_NS * count
        for part in (forward, again):
            kernel_ns[part] += checkpoint_ns / max(1, kernels[part].sum())
            if trace.block_names[each.block] in selective_blocks:
                kernel_ns[part] += SELECTIVE_NS
    return kernel_ns * kernels


@lru_cache(maxsize=_TRACES)
def _in_phase(trace: StepTrace) -> dict[PhaseName, NDArray[np.bool_]]:
    """Return which ops run in the phases of each name."""
    inside = {name: np.zeros(len(trace.ops.event), np.bool_) for name in PHASES}
    for phase in trace.phases:
        if phase.name in inside:
            inside[phase.name][phase_ops(trace, phase)] = True
    return inside


@lru_cache(maxsize=_TRACES)
def last_ops(trace: StepTrace) -> dict[PhaseName, NDArray[np.int64]]:
    """Return the ops of the last micro-batch's forward and backward, and optimizer."""
    none = np.zeros(0, np.int64)
    return {
        name: np.concatenate(
            [none, *(phase_ops(trace, each) for each in _last_phases(trace, name))]
        )
        for name in PHASES
    }


def _last_phases(
    trace: StepTrace, name: PhaseName, micro_step: int | None = None
) -> list[Phase]:
    """Return the phases of this name in the last micro-batch that has some.

    ``micro_step``: in that of the last step.
    """
    phases = [
        phase
        for phase in trace.phases
        if phase.name == name and micro_step in {None, phase.micro_step}
    ]
    last = max(((phase.step, phase.micro_step) for phase in phases), default=None)
    return [phase for phase in phases if (phase.step, phase.micro_step) == last]


def phase_ops(trace: StepTrace, phase: Phase) -> NDArray[np.int64]:
    """Return the ops of a phase."""
    # The first of the optimizer's may allocate nothing: it follows no event of its
    # phase.
    event, in_optimizer = trace.ops.event, trace.ops.in_optimizer
    if phase.name == "optimizer":
        inside = in_optimizer & (event >= phase.start) & (event <= phase.end)
    else:
        inside = ~in_optimizer & (event > phase.start) & (event <= phase.end)
    return np.flatnonzero(inside)


def host_bytes_per_ns(gpu: Gpu) -> float:
    """Return the rate of copies between a GPU and pinned host memory."""
    return (gpu.link_gb_per_s or SLOWEST_LINK) * LINK_SHARE


def interval_ns(trace: StepTrace, times_ns: Nanoseconds, start: int, end: int) -> int:
    """Return the time of the ops between two event positions, in whole nanoseconds.

    An op belongs to the interval in which its outputs are allocated, as counted by
    ``trace.ops.event``. Neighbouring intervals share no op, and the optimizer's ops
    belong to none. Copies to and from the host overlap with kernels: the slower of the
    two streams decides, and the last copy overlaps with nothing. ``start`` and ``end``
    are as in ``Phase``; ``times_ns`` is of ``op_times``.
    """
    return _intervals(trace)[start, end].ns(times_ns)


def step_time_ns(
    trace: StepTrace, times_ns: Nanoseconds, micro_steps: int = 2
) -> StepTime:
    """Return the times of the last micro-batch and of the last optimizer step.

    With ``micro_steps=1`` those of the first micro-batch, which adds to no gradients.
    """

    def phases(name: PhaseName) -> list[Phase]:
        first = 0 if micro_steps == 1 and name != "optimizer" else None
        return _last_phases(trace, name, first)

    return StepTime(
        *(
            sum(_phase_ns(trace, times_ns, each) for each in phases(name))
            for name in PHASES
        )
    )


class _Interval(NamedTuple):
    """Ops in sequence: their numbers, and which are copies; None where none is."""

    ops: slice | NDArray[np.int64]
    is_copy: NDArray[np.bool_] | None

    @classmethod
    def of(cls, trace: StepTrace, ops: NDArray[np.int64]) -> "_Interval":
        """Return the interval of some ops of a trace."""
        is_copy = trace.ops.kind[ops] == _COPY
        copies = is_copy if is_copy.any() else None
        if ops.size and int(ops[-1]) - int(ops[0]) + 1 == ops.size:
            return cls(slice(int(ops[0]), int(ops[-1]) + 1), copies)
        return cls(ops, copies)

    def ns(self, times_ns: Nanoseconds) -> int:
        """Return the time; copies overlap with kernels, but for the last."""
        inside = times_ns[self.ops]
        if self.is_copy is None:
            return round(float(inside.sum()))
        copies = inside[self.is_copy]
        kernels = float(inside[~self.is_copy].sum())
        return round(max(kernels, float(copies[:-1].sum())) + float(copies[-1]))


def _ops_between(trace: StepTrace, start: int, end: int) -> NDArray[np.int64]:
    """Return the ops of a model between two event positions."""
    first, last = np.searchsorted(trace.ops.event, [start, end], side="right")
    here = np.arange(int(first), int(last))
    return here[~trace.ops.in_optimizer[here]]


class _Intervals(dict[tuple[int, int], _Interval]):
    """The ops between two event positions of a trace."""

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self._trace = trace

    def __missing__(self, edges: tuple[int, int]) -> _Interval:
        """Find them the first time."""
        ops = _ops_between(self._trace, *edges)
        self[edges] = found = _Interval.of(self._trace, ops)
        return found


_intervals = lru_cache(maxsize=_TRACES)(_Intervals)


def _phase_ns(trace: StepTrace, times_ns: Nanoseconds, phase: Phase) -> int:
    """Return a phase's time: its blocks and the ops between them, in sequence."""
    # The compute stream waits for host copies at the boundaries of each block.
    if phase.name == "optimizer":
        return _Interval.of(trace, phase_ops(trace, phase)).ns(times_ns)
    total, position = 0, phase.start
    for each in sorted(trace.passes, key=lambda row: row.start):
        if phase.start <= each.start and each.end <= phase.end:
            total += interval_ns(trace, times_ns, position, each.start)
            total += interval_ns(trace, times_ns, each.start, each.end)
            position = each.end
    return total + interval_ns(trace, times_ns, position, phase.end)


def _flops_per_ns(
    gpu: Gpu, shares: RateShares, kind: OpKind, rate: str, *, tf32: bool
) -> float:
    """Return the achieved rate of a kind of op, in operations per nanosecond."""
    # Where a GPU has no tensor cores for a dtype (bf16 before capability 8.0 is
    # emulated) or its rate is unknown, that is the plain fp32 rate.
    tflops = gpu.fp32_tflops * shares.fp32
    on_tensor_cores = True
    if rate == "fp16" and gpu.fp16_tflops:
        tflops = gpu.fp16_tflops * shares.tensor_16bit
    elif rate == "bf16" and gpu.bf16_tflops:
        tflops = gpu.bf16_tflops * shares.tensor_16bit
    elif rate == "fp32" and gpu.tf32_tflops and _in_tf32(kind, tf32=tf32):
        tflops = gpu.tf32_tflops * shares.tf32
    else:
        on_tensor_cores = False
    if rate == "fp64":
        tflops *= _FP64_SHARES.get(gpu.compute_capability, _OTHER_FP64_SHARE)
    share = 1.0
    if rate == "fp32" and not on_tensor_cores and kind.startswith("convolution_3x3"):
        share *= WINOGRAD
    library = kind.partition("_attention")[0]
    if on_tensor_cores and gpu.compute_capability >= HOPPER:
        share *= ON_HOPPER.get(library, 1.0)
    if rate == "fp32" and gpu.tf32_tflops and kind == "efficient_attention_backward":
        share *= FP32_ATTENTION_BACKWARD
    return tflops * 1e3 * share


def _in_tf32(kind: OpKind, *, tf32: bool) -> bool:
    """Whether fp32 tensors are multiplied in TF32, where a GPU has it."""
    # Convolutions are by default (``torch.backends.cudnn.allow_tf32``), attention
    # never.
    if "attention" in kind:
        return False
    return tf32 or "convolution" in kind
