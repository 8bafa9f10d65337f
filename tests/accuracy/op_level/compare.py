"""One recorded call against the model: the bytes alive at the op's worst moment."""

import json
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from budgetfit.core.step_trace import KernelScratch
from budgetfit.memory.scratch_sizes.rules import (
    DeviceProperties,
    rounded_bytes,
    scratch_bytes,
)
from budgetfit.tracing.cuda.kernel_memory.registry import Call as KernelCall
from budgetfit.tracing.cuda.kernel_memory.registry import Unverified, kernel_steps
from budgetfit.tracing.cuda.op_semantics import CudaOpSemantics, imitate_cuda
from budgetfit.tracing.cuda.target import CudaTarget
from budgetfit.tracing.recording.storage_log import StorageLog
from tests.accuracy.op_level.op_call import decode, op_named, strided

# Nothing that is recorded here depends on the card outside the rules.
TARGET = CudaTarget(compute_capability=(8, 0), torch_version=(2, 13), cudnn=False)
WORKSPACES = ("cublas_workspace", "cublaslt_workspace")


def imitation() -> AbstractContextManager[None]:
    """Return the context in which composite ops take CUDA's branches."""
    return imitate_cuda(TARGET)[1]


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
            now = rounded_bytes(*live.values())
            if now > worst_bytes:
                worst, worst_bytes = dict(live), now
        else:
            del live[-request]
    return Moment(
        tuple(sorted(worst.values())), tuple(sorted(live.values())), worst_bytes
    )


class Call(NamedTuple):
    """What the trace of one call holds: events and storages, as in ``StorageLog``.

    ``first``: index of the first storage that the call made; those before are inputs.
    ``uncovered``: the op's rules say that they do not represent this call.
    """

    events: list[int]
    sizes: list[int]
    scratch: dict[int, KernelScratch[int]]
    first: int
    uncovered: bool


def fake_call(op: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Trace one call as a training step is traced, its inputs being there already."""

    def make(
        dtype: torch.dtype, shape: list[int], stride: list[int], offset: int
    ) -> torch.Tensor:
        return strided(dtype, shape, stride, offset, "cpu")

    log = StorageLog(CudaOpSemantics(TARGET))
    with FakeTensorMode():
        inputs, named = decode(args, make, "cpu"), decode(kwargs, make, "cpu")
        log.log_outputs(tree_leaves((inputs, named)))
        first, before = len(log.sizes), len(log.events)
        with log:
            out = op_named(op)(*inputs, **named)
        func = op_named(op)
        steps = kernel_steps(KernelCall(func, tuple(inputs), named, out, TARGET))
        uncovered = any(isinstance(step, Unverified) for step in steps)
        events = log.events[before:]
        log.close()
    del out
    return Call(events, log.sizes, log.scratch, first, uncovered)


def predicted(card: DeviceProperties, call: Call) -> Moment:
    """Return the peak that the model gives the same call."""
    requests: list[int] = []
    number: dict[int, int] = {}  # of the request for a storage
    for event in call.events:
        storage = abs(event) - 1
        if event < 0:
            if storage in number:
                requests.append(-number.pop(storage))
            continue
        size = call.sizes[storage]
        if storage in call.scratch:
            rule, arguments, part = call.scratch[storage]
            if rule in WORKSPACES:  # made before the recorded call
                continue
            size = scratch_bytes(card, rule, arguments)[part]
        if size:
            number[storage] = 1 + sum(request > 0 for request in requests)
            requests.append(size)
    return recorded(requests)


@cache
def recording(path: Path) -> dict[str, Any]:
    """Return a recording."""
    return json.loads(path.read_text("utf-8"))


def card_of(data: dict[str, Any]) -> DeviceProperties:
    """Return what rules ask of a recorded card."""
    major, minor = data["compute_capability"]
    return DeviceProperties((major, minor), data["sm_count"], data["threads_per_sm"])


def matches(case: list[Any], cards: dict[str, DeviceProperties]) -> dict[str, bool]:
    """Return, by card, whether one recorded call is predicted to the byte.

    Cards without such a kernel or with too little memory are left out, and calls that
    the rules do not cover: estimates name them.
    """
    op, args, kwargs, by_card = case
    call = fake_call(op, args, kwargs)
    result: dict[str, bool] = {}
    if call.uncovered:
        return result
    for names, measured in by_card.items():
        real = None if measured is None else recorded(measured)
        for name in names.split() if real is not None else ():
            result[name] = predicted(cards[name], call) == real
    return result
