"""Op sets for selective activation checkpointing: a few good ones per block type.

Under torch's selective checkpointing every op that is not saved runs again, up to the
last one that backward waits for, needed or not. So times and bytes of saved ops add up,
and the best sets solve a knapsack. What a set really costs is then traced
(``option_recipes``).
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from budgetfit.core.step_trace import CATEGORIES, Direction, StepTrace
from budgetfit.memory.chain.profile import block_types
from budgetfit.memory.chain.stages import OptionTrace, steady_micro_step
from budgetfit.memory.reference_allocator.allocator import round_bytes
from budgetfit.solvers.op_knapsack import OpItem, pareto_op_sets
from budgetfit.timing.kernel_times import Nanoseconds

MAX_OP_SETS: Final = 3  # for each type of block; each is one more option to trace
# Casts: autocast caches those of weights, so that the recomputation may lack the call
# (pytorch#141896).
_CASTS: Final = ("aten._to_copy.default",)
# What FSDP2 runs around a block: gathering its weights, reducing its gradients.
_OF_SHARDS: Final = ("fsdp.", "c10d.", "aten._foreach_copy_.")
_IN_PLACE: Final = re.compile(r"\w+\.\w*[^_]_\.")
# Recomputed tensors are activations too, although the backward pass makes them.
_ACTIVATION: Final = CATEGORIES.index("activations")
_MAX_LEADING_OPS: Final = 8  # of the backward pass, before the recomputation


class _Op(NamedTuple):
    """An op call in a block: name, call number, output bytes and time."""

    name: str
    call: int
    made_bytes: int
    time_ns: float


def op_sets_by_type(
    kept: StepTrace,
    recomputed: StepTrace,
    batch_size: int,
    op_times_ns: Callable[[OptionTrace], Nanoseconds],
) -> dict[int, list[tuple[str, ...]]]:
    """Return op sets to save for each block type, fewest bytes first.

    Args:
        kept: A trace without recomputation, whose blocks give the types.
        recomputed: A trace with every block recomputed: gives the ops that run again.
        batch_size: At which sizes and times are compared.
        op_times_ns: Returns the time of each op of a trace.
    """
    found: dict[int, list[tuple[str, ...]]] = {}
    for kind, block in _choices(kept, recomputed, batch_size, op_times_ns):
        found[kind] = [
            tuple(f"{block.ops[at].name}:{block.ops[at].call}" for at in sorted(chosen))
            for chosen in _spread(_below_keeping(block), block.items)
        ]
    return found


def least_ns_per_freed_byte(
    kept: StepTrace,
    recomputed: StepTrace,
    batch_size: int,
    op_times_ns: Callable[[OptionTrace], Nanoseconds],
) -> float:
    """Return a lower bound on the time to free a byte that a kept block holds."""
    # On the convex hull of a block's op sets the first bytes below keeping cost least.
    # The arguments are those of ``op_sets_by_type``.
    least = math.inf
    for _, block in _choices(kept, recomputed, batch_size, op_times_ns):
        for chosen in ((), *block.sets):
            held, left_ns = block.cost(chosen)
            if held < block.kept_bytes:
                least = min(least, left_ns / (block.kept_bytes - held))
    return least


class _BlockOps(NamedTuple):
    """The ops of a block that can be saved, and the sets of these worth saving.

    ``whole_ns`` is the time of all ops that run again, ``kept_bytes`` what the block
    holds where it is kept.
    """

    ops: Sequence[_Op]
    items: Sequence[OpItem]
    sets: Sequence[tuple[int, ...]]
    whole_ns: float
    kept_bytes: int

    def cost(self, chosen: tuple[int, ...]) -> tuple[int, float]:
        """Return the bytes held with some ops saved, and the time of the others."""
        held = sum(self.items[at].saved_bytes for at in chosen)
        return held, self.whole_ns - sum(self.items[at].saved_ns for at in chosen)


def _choices(
    kept: StepTrace,
    recomputed: StepTrace,
    batch_size: int,
    op_times_ns: Callable[[OptionTrace], Nanoseconds],
) -> Iterator[tuple[int, _BlockOps]]:
    """Yield each block type with the ops of a block of it."""
    types = block_types(kept)
    times_ns = op_times_ns(OptionTrace(recomputed, ()))
    for kind in sorted(set(types.values())):
        names = [name for name in types if types[name] == kind]
        block = names[len(names) // 2]
        ops = _run_again(recomputed, block, batch_size, times_ns)
        choice = [op for at, op in enumerate(ops) if _can_be_saved(ops, at)]
        items = [
            OpItem(
                saved_bytes=op.made_bytes,
                saved_ns=round(op.time_ns),
                group=0 if is_random(op.name) else None,
            )
            for op in choice
        ]
        yield (
            kind,
            _BlockOps(
                choice,
                items,
                pareto_op_sets(items, len(items)),
                sum(op.time_ns for op in ops),
                _kept_bytes(kept, block, batch_size),
            ),
        )


def _below_keeping(block: _BlockOps) -> list[tuple[int, ...]]:
    """Drop op sets above the convex hull that includes keeping the whole block."""
    # A kept block costs no recomputation time. So a set must lie below the line from
    # the set before it to that point.
    found = []
    kept_bytes = block.kept_bytes
    last_bytes, last_ns = 0, block.whole_ns
    for chosen in block.sets:
        held, left_ns = block.cost(chosen)
        if held >= kept_bytes:
            break
        share = (held - last_bytes) / (kept_bytes - last_bytes)
        if left_ns >= last_ns * (1 - share):
            break  # on a convex front all following sets are above it too
        found.append(chosen)
        last_bytes, last_ns = held, left_ns
    return found


def _spread(
    sets: Sequence[tuple[int, ...]], items: Sequence[OpItem]
) -> list[tuple[int, ...]]:
    """Return at most ``MAX_OP_SETS`` sets, evenly spread in saved time."""
    saved = [sum(items[at].saved_ns for at in chosen) for chosen in sets]
    wanted = (
        [saved[-1] * (n + 1) / MAX_OP_SETS for n in range(MAX_OP_SETS)] if sets else []
    )
    nearest = (
        min(range(len(sets)), key=lambda at: (abs(saved[at] - time_ns), at))
        for time_ns in wanted
    )
    return [sets[at] for at in dict.fromkeys(nearest)]


@functools.cache
def is_random(name: str) -> bool:
    """Whether an op may draw random numbers; the name is as in ``op_names``."""
    namespace, packet, overload = name.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return torch.Tag.nondeterministic_seeded in op.tags


def _can_be_saved(ops: Sequence[_Op], at: int) -> bool:
    """Whether an op makes an output that is not overwritten in place."""
    follower = ops[at + 1].name if at + 1 < len(ops) else ""
    return (
        ops[at].made_bytes > 0
        and ops[at].name not in _CASTS
        and _IN_PLACE.match(ops[at].name) is None
        # It would overwrite the saved output, which torch refuses.
        and _IN_PLACE.match(follower) is None
    )


def _run_again(
    trace: StepTrace, block: str, batch_size: int, times_ns: Nanoseconds
) -> list[_Op]:
    """Return the op calls of a block's forward that are recomputed in its backward."""
    (_, names), (backward, again) = (
        _rows_and_names(trace, block, direction)
        for direction in ("forward", "backward")
    )

    def alike(offset: int) -> int:
        pairs = zip(names, again[offset:], strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), len(again))

    offset = max(range(min(_MAX_LEADING_OPS, len(again))), key=alike, default=0)
    length = min(alike(offset), len(names), len(again) - offset)
    calls: Counter[str] = Counter()
    ops = []
    for name, row in zip(names[:length], backward[offset:], strict=False):
        made = _made(trace, row)
        if any(trace.category[storage] != _ACTIVATION for storage in made):
            break  # the backward's first op has the name of the next forward op
        size = sum(_size(trace, storage, batch_size) for storage in made)
        ops.append(_Op(name, calls[name], size, float(times_ns[row])))
        calls[name] += 1
    return ops


def _rows_and_names(
    trace: StepTrace, block: str, direction: Direction
) -> tuple[list[int], list[str]]:
    """Return the op numbers and names of one block's pass, without FSDP2's own."""
    rows, names = [], []
    for row in _rows(trace, block, direction):
        name = trace.op_names[trace.ops.name[row]]
        if not name.startswith(_OF_SHARDS):
            rows.append(row)
            names.append(name)
    return rows, names


def _kept_bytes(kept: StepTrace, block: str, batch_size: int) -> int:
    """Return the activation bytes that a kept block holds until its backward."""
    step, micro_step = steady_micro_step(kept)
    forward = next(
        row
        for row in kept.passes
        if (row.direction, row.step, row.micro_step) == ("forward", step, micro_step)
        and kept.block_names[row.block] == block
    )
    events = kept.events[forward.start : forward.end].tolist()
    freed = {-event for event in events if event < 0}
    return sum(
        _size(kept, event - 1, batch_size)
        for event in events
        if event > 0 and event not in freed
    )


def _size(trace: StepTrace, storage: int, batch_size: int) -> int:
    fixed, slope = trace.fixed_bytes[storage], trace.bytes_per_sample[storage]
    return round_bytes(int(fixed) + int(slope) * batch_size)


def _rows(trace: StepTrace, block: str, direction: Direction) -> range:
    """Return the op numbers of one block's pass in the steady micro-step."""
    step, micro_step = steady_micro_step(trace)
    for row in trace.passes:
        if (
            trace.block_names[row.block] == block
            and row.direction == direction
            and (row.step, row.micro_step) == (step, micro_step)
        ):
            first, last = trace.ops.event.searchsorted(
                [row.start, row.end], side="right"
            )
            return range(int(first), int(last))
    return range(0)


def _made(trace: StepTrace, row: int) -> list[int]:
    """Return the storages that an op allocates and does not free."""
    start = int(trace.ops.event[row - 1]) if row else 0
    events = trace.events[start : trace.ops.event[row]].tolist()
    return [event - 1 for event in events if event > 0 and -event not in events]
