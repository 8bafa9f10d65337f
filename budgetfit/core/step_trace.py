"""StepTrace: allocations and frees of all storages in a few training steps.

Sizes are affine in the batch size: ``fixed + per_sample * batch_size`` bytes before
rounding. A kernel's scratch memory is not affine (it follows the launch configuration),
so its storage names a rule of ``memory.scratch_sizes`` and that rule's arguments, which
are affine. That is what lets one trace serve every batch size and card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

Category = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "activations",
    "temporaries",
    "workspace",
    "batch",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
PhaseName = Literal["setup", "forward", "backward", "optimizer"]
Direction = Literal["forward", "backward"]

# What an op's arithmetic runs on: a matrix product by its input dtype, or plain
# arithmetic; ``host`` is a copy to or from host memory, concurrent with kernels. Of
# ``elements``, what is counted as operations are elements that threads load one by one.
RATES = ("none", "fp32", "fp16", "bf16", "fp64", "host", "elements")
OpKind = Literal[
    "elementwise",
    "copy",
    "reduction",
    "softmax",
    "norm",
    "norm_backward",
    "batch_norm",
    "plain_batch_norm",
    "pooling",
    "optimizer",
    "matmul",
    "small_batched_matmul",
    "unaligned_matmul",
    "flash_attention",
    "flash_attention_backward",
    "efficient_attention",
    "efficient_attention_backward",
    "cudnn_attention",
    "cudnn_attention_backward",
    "convolution",
    "convolution_backward",
    "convolution_3x3",
    "convolution_3x3_backward",
    "grouped_convolution",
    "depthwise_convolution",
    "host",
    "cpu",
]
# What the kernels of an op do; each kind has its own shares of a GPU's rates.
OP_KINDS: tuple[OpKind, ...] = get_args(OpKind)
EMPTY_CACHE: Final = 0  # the event of ``torch.cuda.empty_cache()``
FUSED_KERNEL: Final = "budgetfit.fused_kernel.default"  # of compiled code
# Ops of ours that copy between the device and pinned host memory (applying.host_copy):
# what ``to_host`` returns takes no device memory.
TO_HOST, TO_DEVICE = "budgetfit.to_host.default", "budgetfit.to_device.default"
# The copies of ``fully_shard`` itself, with ``CPUOffloadPolicy``: of a trace alone.
SHARD_TO_HOST: Final = "budgetfit.shard_to_host.default"
SHARD_TO_DEVICE: Final = "budgetfit.shard_to_device.default"
HOST_STATE: Final = "budgetfit.host_state"  # no op: an optimizer's state on the CPU


class Affine(NamedTuple):
    """A whole number that grows linearly with the batch size."""

    fixed: int
    per_sample: int

    def at(self, batch_size: int) -> int:
        """Return the value at ``batch_size``."""
        return self.fixed + self.per_sample * batch_size


Number = TypeVar("Number", int, Affine)


class KernelScratch(NamedTuple, Generic[Number]):
    """One buffer of a kernel's scratch memory.

    ``memory.scratch_sizes`` has the rule, which sizes all buffers of a kernel from the
    same arguments; ``part`` is this one's position. The arguments are integers where a
    kernel is called, and affine in a trace.
    """

    rule: str
    arguments: tuple[Number, ...]
    part: int


class SizeLimit(NamedTuple, Generic[Number]):
    """A number of a call that its CUDA kernel takes only up to ``most``.

    ``what`` counts it, as "elements of its input"; ``source`` is the file of PyTorch
    that refuses more. The number is an integer where an op is called, and affine in a
    trace.
    """

    op: str
    what: str
    number: Number
    most: int
    source: str


class UnverifiedOp(NamedTuple):
    """An op without a verified memory rule, and the storages it allocated."""

    name: str
    storages: tuple[int, ...]


class Phase(NamedTuple):
    """A phase as a range of events: ``start`` inclusive, ``end`` exclusive.

    ``step`` counts optimizer steps from 0 (-1 before the first), ``micro_step`` the
    micro-batches within one.
    """

    name: PhaseName
    step: int
    micro_step: int
    start: int
    end: int


class BlockPass(NamedTuple):
    """One block's forward or backward (recomputation included) as a range of events.

    ``block`` indexes ``StepTrace.block_names``. ``input_storage`` and
    ``output_storage`` index the storages of the block's first tensor
    input and output; -1 where there is none.
    """

    block: int
    direction: Direction
    step: int
    micro_step: int
    start: int
    end: int
    input_storage: int
    output_storage: int


@dataclass(frozen=True, slots=True, eq=False)
class OpTable:
    """FLOPs and bytes of the ops of a trace, one entry per op, in order.

    ``event`` is the number of events before the op ended, ``layer`` the running module,
    ``name`` an index into ``StepTrace.op_names``; ``in_optimizer`` tells the ops of the
    optimizer phase, which may begin without an event; ``recomputed`` those that run
    again in a backward. The others are what the op asks of a GPU, as in ``OpCost``:
    ``kind`` (index into ``OP_KINDS``), ``rate`` (index into ``RATES``), floating-point
    operations and bytes (both affine), ``kernels``, ``efficiency`` and ``blocks``.
    """

    event: NDArray[np.int64]
    layer: NDArray[np.int32]
    in_optimizer: NDArray[np.bool_]
    kind: NDArray[np.int8]
    kernels: NDArray[np.int16]
    efficiency: NDArray[np.float64]
    blocks: NDArray[np.int16]
    rate: NDArray[np.int8]
    flops_fixed: NDArray[np.float64]
    flops_per_sample: NDArray[np.float64]
    bytes_fixed: NDArray[np.float64]
    bytes_per_sample: NDArray[np.float64]
    name: NDArray[np.int32]
    recomputed: NDArray[np.bool_]


# What tells an op from another, but for where it is.
OP_COST_COLUMNS: Final = (
    *("name", "kind", "kernels", "efficiency", "blocks", "rate"),
    *("flops_fixed", "flops_per_sample", "bytes_fixed", "bytes_per_sample"),
)


_Range = TypeVar("_Range", Phase, BlockPass)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepTrace:
    """Training steps as allocations and frees.

    Attributes:
        batch_sizes: The traced batch sizes; with one, sizes are valid only for it.
        layers: Module paths; ``layer`` indexes them (-1: outside every module).
        block_names: Module paths of all candidate blocks; passes index them.
        blocks: Those of them that ran, in execution order.
        joined: For each block, whether its output is the very tensor that the next
            block takes, so that one segment may span both.
        fixed_bytes, bytes_per_sample: Each storage's size, affine, unrounded.
        category: Each storage's index into ``CATEGORIES``.
        layer: Each storage's index into ``layers``.
        scratch_index: Index into ``scratch``, or -1 for an affine size.
        scratch: Storages sized by a kernel rule.
        stream: Each storage's CUDA stream, 0 for the default one. May be shorter: the
            rest are on the default stream.
        events: ``k + 1`` allocates storage k, ``-(k + 1)`` frees it; 0 is
            ``EMPTY_CACHE``.
        phases: Consecutive ranges of events.
        passes: Forward and backward passes of the blocks.
        ops: FLOPs and bytes.
        op_names: Names of ops such as ``aten.mm.default``; ``ops.name`` indexes them.
        unverified_ops: Ops that allocated memory without a verified rule.
        size_limits: What the kernels of its ops refuse in larger sizes.
        notes: What the trace could not represent.
        gives_containers: Whether a block was given a dict, list or object, which it
            could change.
    """

    batch_sizes: tuple[int, ...]
    layers: tuple[str, ...]
    block_names: tuple[str, ...]
    blocks: tuple[str, ...]
    joined: tuple[bool, ...]
    fixed_bytes: NDArray[np.int64]
    bytes_per_sample: NDArray[np.int64]
    category: NDArray[np.int8]
    layer: NDArray[np.int32]
    scratch_index: NDArray[np.int32]
    scratch: tuple[KernelScratch[Affine], ...]
    events: NDArray[np.int32]
    phases: tuple[Phase, ...]
    passes: tuple[BlockPass, ...]
    ops: OpTable
    op_names: tuple[str, ...] = field(default=())
    random_blocks: tuple[str, ...] = field(default=())
    unverified_ops: tuple[UnverifiedOp, ...] = field(default=())
    size_limits: tuple[SizeLimit[Affine], ...] = field(default=())
    notes: tuple[str, ...] = field(default=())
    stream: NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, np.int8))
    gives_containers: bool = False

    def exceeded_limit(self, batch_size: int) -> SizeLimit[int] | None:
        """Return the first of the size limits that a batch size exceeds."""
        for limit in self.size_limits:
            number = limit.number.at(batch_size)
            if number > limit.most:
                return SizeLimit(*limit[:2], number, *limit[3:])
        return None

    def largest_batch(self, bound: int) -> int:
        """Return the largest batch size up to ``bound`` that no size limit refuses."""
        for limit in self.size_limits:
            fixed, per_sample = limit.number
            if fixed > limit.most:
                return 0
            if per_sample:
                bound = min(bound, (limit.most - fixed) // per_sample)
        return bound

    def side_streams(self) -> dict[int, int]:
        """Return the streams of storages not on the default one, as events number."""
        rows = np.flatnonzero(self.stream)
        return dict(zip((rows + 1).tolist(), self.stream[rows].tolist(), strict=True))

    def stream_column(self) -> NDArray[np.int8]:
        """Return each storage's stream."""
        return np.pad(self.stream, (0, len(self.layer) - len(self.stream)))

    def at_samples(self, samples: int) -> StepTrace:
        """Return a trace whose sizes are those at ``samples``, whatever is asked."""
        return replace(
            self,
            fixed_bytes=self.fixed_bytes + self.bytes_per_sample * samples,
            bytes_per_sample=np.zeros_like(self.bytes_per_sample),
            scratch=tuple(
                row._replace(
                    arguments=tuple(Affine(n.at(samples), 0) for n in row.arguments)
                )
                for row in self.scratch
            ),
        )

    def with_setup_events(
        self, events: Sequence[int], *, ops_from: int = 0
    ) -> StepTrace:
        """Return the trace with other events in its first phase, the setup.

        Ops at event ``ops_from`` or later move with what follows.
        """
        setup, *phases = self.phases
        shift = len(events) - setup.end

        def moved(row: _Range) -> _Range:
            return row._replace(start=row.start + shift, end=row.end + shift)

        rest = self.events[setup.end :]
        ops = self.ops.event + shift * (self.ops.event >= ops_from)
        return replace(
            self,
            events=np.concatenate([np.asarray(events, rest.dtype), rest]),
            phases=(setup._replace(end=len(events)), *map(moved, phases)),
            passes=tuple(map(moved, self.passes)),
            ops=replace(self.ops, event=ops),
        )
