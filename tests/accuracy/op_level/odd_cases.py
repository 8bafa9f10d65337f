"""Odd calls of every recorded op: its calls with other layouts, sizes and dtypes.

What changes is drawn at random: tensors become permuted, sliced, expanded or
channels-last; all dimensions of one size become empty, 1 or another size; one tensor is
broadcast; dtypes change for all tensors or, to have them promoted, for one.
"""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.accuracy.op_level.op_call import contiguous, decode, encode, op_named
from tests.accuracy.op_level.op_layouts import Case, seeded, tensor

RECORDINGS = Path(__file__).parent / "recordings"
CALLS_OF_AN_OP = 8
TRIES = 6  # for each
MOST_ELEMENTS = 2**21  # of a tensor: more take long
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OTHER = (torch.int64, torch.int32, torch.bool, torch.uint8)
SIZES = (0, 1, 1, 2, 3, 17, 96, 130, 1025)
# Random state and statistics of these have one dtype and one layout.
STRICT = (
    *("_scaled_dot_product", "_thnn_fused", "_ctc_loss", "_amp_", "_fused_adam"),
    "_pdist_forward",
)

Change = Callable[[random.Random, Any], Any]


def odd(seed: int) -> Iterator[Case]:
    """Yield odd calls of every op that is recorded in a family of another kind."""
    for op, calls in sorted(plain_calls().items()):
        rng = seeded(f"{seed} {op}")
        known = {json.dumps(call) for call in calls}
        found: dict[str, Case] = {}
        for _ in range(CALLS_OF_AN_OP * TRIES):
            call = odd_call(rng, op, calls)
            if call is not None:
                found[json.dumps(encode(call[1:]))] = call
            if len(found.keys() - known) == CALLS_OF_AN_OP:
                break
        yield from (call for text, call in found.items() if text not in known)


def plain_calls() -> dict[str, list[Any]]:
    """Return the arguments of all recorded calls by op, odd ones excepted."""
    calls: dict[str, list[Any]] = defaultdict(list)
    for path in sorted(RECORDINGS.glob("*.json")):
        if not path.stem.startswith("odd_calls"):
            for op, args, kwargs, _ in json.loads(path.read_text("utf-8"))["cases"]:
                calls[str(op_named(op)).removeprefix("aten.")].append((args, kwargs))
    return calls


def odd_call(rng: random.Random, op: str, calls: list[Any]) -> Case | None:
    """Return a changed call, or None if it is too large or no valid call."""
    args, kwargs = decode(list(rng.choice(calls)), tensor_of, "meta")
    if elements((args, kwargs)) > MOST_ELEMENTS:
        return None
    changes: list[Change] = [other_size, other_size, broadcast, other_layouts]
    if not op.startswith(STRICT):
        changes += [other_dtypes, other_dtypes, one_dtype]
    for change in rng.sample(changes, rng.randint(0, 2)):
        args, kwargs = change(rng, (args, kwargs))
    args, kwargs = other_layouts(rng, (args, kwargs))
    case = op, args, kwargs
    return (
        case if elements((args, kwargs)) <= MOST_ELEMENTS and is_valid(case) else None
    )


def tensor_of(
    dtype: torch.dtype, shape: list[int], stride: list[int], offset: int
) -> torch.Tensor:
    """Return a tensor without memory."""
    return tensor(shape, dtype, stride, offset)


def mapped(change: Callable[[torch.Tensor], torch.Tensor], call: object) -> Any:
    """Change every tensor on the card."""
    return tree_map(
        lambda x: change(x) if isinstance(x, torch.Tensor) and x.is_meta else x, call
    )


def tensors(call: object) -> list[torch.Tensor]:
    """Return the tensors on the card."""
    found: list[torch.Tensor] = []
    mapped(lambda x: found.append(x) or x, call)
    return found


def elements(call: object) -> int:
    """Return the elements of the largest tensor."""
    return max((x.numel() for x in tensors(call)), default=0)


def is_valid(case: Case) -> bool:
    """Return whether the call runs on tensors without memory."""
    op, *arguments = case
    args, kwargs = mapped(lambda x: tensor_like(x, x.dtype), arguments)
    try:
        op_named(op)(*args, **kwargs)
    except Exception:  # noqa: BLE001 - meta kernels raise anything
        return False
    return True


def other_size(rng: random.Random, call: object) -> Any:
    """Change every dimension of one size, and that number among the arguments."""
    sizes = sorted({n for x in tensors(call) for n in x.shape})
    if not sizes:
        return call
    old, new = rng.choice(sizes), rng.choice(SIZES)

    def change(value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            shape = [new if n == old else n for n in value.shape]
            return tensor(shape, value.dtype, strides_in_order(value, shape))
        if type(value) is int and value == old > max(SIZES[:5]):
            return new
        return value

    return tree_map(change, call)


def strides_in_order(x: torch.Tensor, shape: list[int]) -> list[int]:
    """Return dense strides for a shape, in the order of those of ``x``."""
    order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
    strides = [0] * len(shape)
    for dim, stride in zip(order, contiguous([shape[d] for d in order]), strict=True):
        strides[dim] = stride
    return strides


def broadcast(rng: random.Random, call: object) -> Any:
    """Make some dimensions of one tensor 1, or leave the first ones out."""
    chosen = rng.randrange(max(1, len(tensors(call))))
    kind, count = rng.randint(0, 2), iter(range(10**6))

    def change(x: torch.Tensor) -> torch.Tensor:
        if next(count) != chosen:
            return x
        if kind == 0:
            return tensor([], x.dtype)
        if kind == 1:
            return tensor(list(x.shape[rng.randint(0, x.dim()) :]), x.dtype)
        return tensor([rng.choice((1, n)) for n in x.shape], x.dtype)

    return mapped(change, call)


def other_dtypes(rng: random.Random, call: object) -> Any:
    """Change the dtype of all floating-point tensors, now and then to integers."""
    new = rng.choice((*FLOATING, *FLOATING, *OTHER))
    return mapped(lambda x: tensor_like(x, new) if x.is_floating_point() else x, call)


def one_dtype(rng: random.Random, call: object) -> Any:
    """Change the dtype of one tensor."""
    chosen, count = rng.randrange(max(1, len(tensors(call)))), iter(range(10**6))
    new = rng.choice((*FLOATING, *OTHER))
    return mapped(lambda x: tensor_like(x, new) if next(count) == chosen else x, call)


def tensor_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the same layout."""
    return tensor(list(x.shape), dtype, list(x.stride()), x.storage_offset())


def other_layouts(rng: random.Random, call: object) -> Any:
    """Change the layout of some tensors."""
    return mapped(lambda x: other_layout(rng, x) if rng.random() < 0.6 else x, call)


def other_layout(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape: permuted, sliced, expanded, channels last."""
    shape, ndim = list(x.shape), x.dim()
    if not ndim:
        return x
    order, whole, start = list(range(ndim)), list(shape), 0
    kind = rng.choice(("plain", "permuted", "sliced", "both", "last", "expanded"))
    if kind in ("permuted", "both"):
        rng.shuffle(order)
    elif kind == "last":
        order = [0, *range(2, ndim), 1][:ndim] if ndim > 1 else order
    strides = [0] * ndim
    sliced = rng.randrange(ndim) if kind in ("sliced", "both") else -1
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, whole[dim]) * (2 if dim == sliced else 1)
    if sliced >= 0:
        start = rng.choice((0, 1, 8)) * strides[sliced]
    if kind == "expanded":
        strides[rng.randrange(ndim)] = 0
    return tensor(shape, x.dtype, strides, start)
