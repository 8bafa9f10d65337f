"""One recorded call against the model: the bytes alive at the op's worst moment."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from budgetfit.memory.kernel_scratch import KernelCard, scratch_bytes
from budgetfit.memory.scratch_rules import block_bytes
from budgetfit.tracing.cuda_semantics.temporaries import (
    Scratch,
    output_bytes_of,
    temporaries_of,
)
from tests.accuracy.op_level.op_call import decode, op_named, strided


class Moment(NamedTuple):
    """What a call had allocated at its peak, in bytes as requested, sorted.

    ``alive``: at the peak; ``outputs``: what stays when the call ends; ``peak``: in
    rounded blocks.
    """

    alive: tuple[int, ...]
    outputs: tuple[int, ...]
    peak: int


def recorded(requests: list[int]) -> Moment:
    """Return the peak of a recorded call."""
    live: dict[int, int] = {}
    worst: dict[int, int] = {}
    worst_bytes = count = 0
    for request in requests:
        if request > 0:
            count += 1
            live[count] = request
            now = block_bytes(*live.values())
            if now > worst_bytes:
                worst, worst_bytes = dict(live), now
        else:
            del live[-request]
    return Moment(
        tuple(sorted(worst.values())), tuple(sorted(live.values())), worst_bytes
    )


def fake_call(
    op: str, args: list[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Scratch, ...], tuple[int, ...]]:
    """Return the model's requests for a call, and the bytes of its new storages."""

    def make(
        dtype: torch.dtype, shape: list[int], stride: list[int], offset: int
    ) -> torch.Tensor:
        return strided(dtype, shape, stride, offset, "cpu")

    with FakeTensorMode():
        inputs, named = tuple(decode(args, make)), decode(kwargs, make)
        func = op_named(op)
        out = func(*inputs, **named)
        old = {_storage(leaf) for leaf in tree_leaves((inputs, named))}
        new = {
            _storage(leaf): leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(out)
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in old
        }
        requests = temporaries_of(func, inputs, named, out)
        whole = output_bytes_of(func, inputs, named, out)
    sizes = new.values() if whole is None else [whole]
    return requests, tuple(sorted(size for size in sizes if size))


def predicted(
    card: KernelCard, requests: tuple[Scratch, ...], outputs: tuple[int, ...]
) -> Moment:
    """Return the peak that the model gives the same call."""
    scratch = [
        size
        for request in requests
        for size in scratch_bytes(card, request.rule, request.arguments)
        if size
    ]
    alive = tuple(sorted((*scratch, *outputs)))
    return Moment(alive, outputs, block_bytes(*alive))


def _storage(leaf: object) -> int | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    return leaf.untyped_storage()._cdata  # noqa: SLF001 - an identity
