"""Fit sizes as affine functions of the batch size, from traces at two batch sizes.

Rounding to the allocator's 512 bytes happens in the replay, after scaling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from budgetfit.core.step_trace import (
    Affine,
    KernelScratch,
    OpTable,
    SizeLimit,
    StepTrace,
    UnverifiedOp,
)

if TYPE_CHECKING:
    from budgetfit.tracing.recording.raw_trace import RawTrace


class NotAffineError(Exception):
    """Two batch sizes ran different programs: each size must be traced separately."""


def exact_trace(raw: RawTrace, blocks: Sequence[str]) -> StepTrace:
    """Return a StepTrace for the traced batch size alone."""
    return _build(raw, raw, blocks, (raw.batch_size,))


def affine_trace(first: RawTrace, second: RawTrace, blocks: Sequence[str]) -> StepTrace:
    """Return a StepTrace for every batch size, from two that ran the same program.

    Raises:
        NotAffineError: If the two differ in more than sizes, or a size cannot be
            affine; the message names what differs.
    """
    pairs = (
        ("allocations and frees", first.log.events, second.log.events),
        ("streams", first.log.streams, second.log.streams),
        ("phases", first.phases, second.phases),
        ("block passes", first.passes, second.passes),
        (
            "kernel scratch",
            {k: (v.rule, v.part) for k, v in first.log.scratch.items()},
            {k: (v.rule, v.part) for k, v in second.log.scratch.items()},
        ),
        (
            "ops",
            [(op.name, op.event) for op in first.log.ops],
            [(op.name, op.event) for op in second.log.ops],
        ),
    )
    for what, one, other in pairs:
        if one != other:
            raise NotAffineError(
                f"batch sizes {first.batch_size} and {second.batch_size} have "
                f"different {what} ({len(one)} and {len(other)})"
            )
    return _build(first, second, blocks, (first.batch_size, second.batch_size))


def _build(
    first: RawTrace, second: RawTrace, blocks: Sequence[str], sizes: tuple[int, ...]
) -> StepTrace:
    log = first.log
    fixed, slope = _fit(first, second, log.sizes, second.log.sizes)
    scratch_index = np.full(len(log.sizes), -1, np.int32)
    # Equal blocks have equal ones: each pair is fitted once, and each result kept once.
    scratch: dict[KernelScratch[Affine], int] = {}
    known: dict[tuple[KernelScratch[int], KernelScratch[int]], int] = {}
    for storage, row in log.scratch.items():
        other = second.log.scratch[storage]
        if (row, other) not in known:
            constants, slopes = _fit(first, second, row.arguments, other.arguments)
            arguments = tuple(
                Affine(int(a), int(b)) for a, b in zip(constants, slopes, strict=True)
            )
            found = KernelScratch(row.rule, arguments, row.part)
            known[row, other] = scratch.setdefault(found, len(scratch))
        scratch_index[storage] = known[row, other]
    stream = np.zeros(1 + max(log.streams, default=-1), np.int8)
    stream[list(log.streams)] = list(log.streams.values())
    names = {name: n for n, name in enumerate(dict.fromkeys(op.name for op in log.ops))}
    return StepTrace(
        batch_sizes=sizes,
        layers=tuple(first.layers),
        block_names=tuple(blocks),
        blocks=tuple(blocks[index] for index in first.blocks),
        joined=(*first.joined, False)[: len(first.blocks)],
        fixed_bytes=fixed,
        bytes_per_sample=slope,
        category=np.array(log.categories, np.int8),
        layer=np.array(log.layers, np.int32),
        scratch_index=scratch_index,
        scratch=tuple(scratch),
        events=np.array(log.events, np.int32),
        phases=tuple(first.phases),
        passes=tuple(first.passes),
        ops=_ops(first, second, names),
        op_names=tuple(names),
        unverified_ops=_unverified(log.unverified),
        random_blocks=tuple(blocks[index] for index in sorted(first.random_blocks)),
        size_limits=_size_limits(first, second),
        notes=tuple(first.notes),
        stream=stream,
        gives_containers=first.gives_containers,
    )


def _size_limits(first: RawTrace, second: RawTrace) -> tuple[SizeLimit[Affine], ...]:
    """Return the size limits of both runs, each once."""
    # Equal blocks have equal ones. A run whose second step is a copy of its first has
    # fewer than one that was traced for two, in the same order.
    pairs = dict.fromkeys(zip(first.log.limits, second.log.limits, strict=False))
    fixed, slope = _fit(
        first,
        second,
        [one.number for one, _ in pairs],
        [other.number for _, other in pairs],
    )
    numbers = zip(pairs, fixed.tolist(), slope.tolist(), strict=True)
    return tuple(
        SizeLimit(*one[:2], Affine(at_zero, per_sample), *one[3:])
        for (one, _), at_zero, per_sample in numbers
    )


def _unverified(made_by: dict[int, str]) -> tuple[UnverifiedOp, ...]:
    """Return the unverified ops with their storages, by name."""
    storages: dict[str, list[int]] = defaultdict(list)
    for storage, name in made_by.items():
        storages[name].append(storage)
    return tuple(
        UnverifiedOp(name, tuple(made)) for name, made in sorted(storages.items())
    )


def _ops(first: RawTrace, second: RawTrace, names: dict[str, int]) -> OpTable:
    one, other = first.log.ops, second.log.ops
    flops, flops_slope, moved, moved_slope = (
        column
        for name in ("flops", "moved_bytes")
        for column in _fit(
            first,
            second,
            [getattr(op.cost, name) for op in one],
            [getattr(op.cost, name) for op in other],
            np.float64,
        )
    )
    return OpTable(
        event=np.array([op.event for op in one], np.int64),
        layer=np.array([op.layer for op in one], np.int32),
        in_optimizer=np.array([op.in_optimizer for op in one], np.bool_),
        kind=np.array([op.cost.kind for op in one], np.int8),
        kernels=np.array([op.cost.kernels for op in one], np.int16),
        efficiency=np.array([op.cost.efficiency for op in one], np.float64),
        blocks=np.array([op.cost.blocks for op in one], np.int16),
        rate=np.array([op.cost.rate for op in one], np.int8),
        flops_fixed=flops,
        flops_per_sample=flops_slope,
        bytes_fixed=moved,
        bytes_per_sample=moved_slope,
        name=np.array([names[op.name] for op in one], np.int32),
        recomputed=np.array([op.recomputed for op in one], np.bool_),
    )


def _fit(
    first: RawTrace,
    second: RawTrace,
    at_first: Sequence[float],
    at_second: Sequence[float],
    dtype: type = np.int64,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Fit values of two runs, as ``fit_affine``."""
    return fit_affine(
        np.array(at_first, dtype),
        np.array(at_second, dtype),
        (first.batch_size, second.batch_size),
    )


def fit_affine(
    one: NDArray[Any], other: NDArray[Any], sizes: tuple[int, int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return intercepts and slopes of values at two batch sizes.

    Raises:
        NotAffineError: If a value shrinks or grows faster than the batch (scores of
            every sample against every other): intercept or slope would be negative.
    """
    span = sizes[1] - sizes[0]
    if span == 0:
        return one, np.zeros_like(one)
    slope = (other - one) / span if one.dtype.kind == "f" else (other - one) // span
    fixed = one - slope * sizes[0]
    odd = np.flatnonzero((fixed < 0) | (slope < 0))
    if len(odd):
        raise NotAffineError(
            f"batch sizes {sizes[0]} and {sizes[1]} are on no line: "
            f"{one[odd[0]]:.0f} and {other[odd[0]]:.0f}"
        )
    return fixed, slope
