"""Record what the CUDA kernel of one op asks of the caching allocator.

Runs on a card, or on PyTorch's own host code without one::

    python -m tests.accuracy.op_level.record_ops FAMILY CARD OUT.json

FAMILY names a generator of ``op_families``. A request is a positive number of bytes, as
asked for; ``-k`` frees the k-th request. Recordings of several cards are put together
by ``merge_recordings``.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.accuracy.op_level.op_call import decode, encode, op_named, strided
from tests.accuracy.op_level.op_families import FAMILIES

NULL_DRIVER = "NullCUDA"


def requests_of(op: str, args: list[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the requests and frees of one call; what stays is the op's output."""

    def make(dtype: torch.dtype, *layout: Any) -> torch.Tensor:
        return strided(dtype, *layout, device="cuda")

    inputs = decode(args, make)
    named = {key: decode(value, make) for key, value in kwargs.items()}
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=10**6, context=None, clear_history=True)
    out = op_named(op)(*inputs, **named)
    trace = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(enabled=None)
    requests: list[int] = []
    place: dict[int, int] = {}
    count = 0
    for event in trace:
        if event["action"] == "alloc":
            count += 1
            place[event["addr"]] = count
            requests.append(event["size"])
        elif event["action"] == "free_completed":
            requests.append(-place.pop(event["addr"]))
    del out
    return requests


def record(family: str) -> dict[str, Any]:
    """Return the recording of every case of a family on this machine's card."""
    torch.backends.cudnn.enabled = False
    properties = torch.cuda.get_device_properties(0)
    for dtype in (torch.float32, torch.bfloat16):  # the workspace is there before
        one = torch.ones(8, 8, device="cuda", dtype=dtype)
        torch.mm(one, one)
    gc.disable()
    cases = []
    for op, args, kwargs in FAMILIES[family]():
        data = encode(args), {key: encode(value) for key, value in kwargs.items()}
        try:
            requests = requests_of(op, *data)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            print(op, data, str(error).splitlines()[0], file=sys.stderr)
            requests = None
            torch.cuda.empty_cache()
        cases.append(
            {"op": op, "args": data[0], "kwargs": data[1], "requests": requests}
        )
    return {
        "origin": "null driver" if properties.name == NULL_DRIVER else "gpu",
        "device": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "sm_count": properties.multi_processor_count,
        "threads_per_sm": properties.max_threads_per_multi_processor,
        "torch": torch.__version__,
        "cases": cases,
    }


def main() -> None:
    """Record one family and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.write_text(json.dumps(record(options.family)), encoding="utf-8")


if __name__ == "__main__":
    main()
