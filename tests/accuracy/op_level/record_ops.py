"""Record what the CUDA kernel of one op asks of the caching allocator.

Runs on a card, or on PyTorch's own CUDA host code without one (the null driver)::

    python -m tests.accuracy.op_level.record_ops CARD [FAMILY ...]

FAMILY names a generator of ``op_families``, all of them without one; CARD is what the
recording calls this card.
``recordings/FAMILY.json`` gets the card's requests beside those of other cards. A
request is a positive number of bytes, as asked for; ``-k`` frees the k-th request. What
is never freed is the op's output.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.accuracy.op_level.op_call import decode, encode, op_named, strided
from tests.accuracy.op_level.op_families import FAMILIES

NULL_DRIVER_DEVICE = "NullCUDA"
RECORDINGS = Path(__file__).parent / "recordings"


def requests_of(op: str, args: list[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the requests and frees of one call."""

    def make(
        dtype: torch.dtype, shape: list[int], stride: list[int], offset: int
    ) -> torch.Tensor:
        return strided(dtype, shape, stride, offset, "cuda")

    inputs, named = decode(args, make, "cuda"), decode(kwargs, make, "cuda")
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=10**6, context=None, clear_history=True)
    out = op_named(op)(*inputs, **named)
    trace = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(enabled=None)
    requests: list[int] = []
    number: dict[int, int] = {}  # of the request at an address
    for event in trace:
        if event["action"] == "alloc":
            number[event["addr"]] = 1 + sum(request > 0 for request in requests)
            requests.append(event["size"])
        elif event["action"] == "free_completed":
            requests.append(-number.pop(event["addr"]))
    del out
    return requests


def try_requests(op: str, args: list[Any], kwargs: dict[str, Any]) -> list[int] | None:
    """Return None where this card has no such kernel or too little memory."""
    try:
        return requests_of(op, args, kwargs)
    except (RuntimeError, IndexError, ValueError) as error:  # out of memory is one
        print(op, args, str(error).partition("\n")[0], file=sys.stderr)
        torch.cuda.empty_cache()
        return None


def card_properties() -> dict[str, Any]:
    """Return what this card is, and what stands behind it."""
    properties = torch.cuda.get_device_properties(0)
    null = properties.name == NULL_DRIVER_DEVICE
    return {
        "origin": "null driver" if null else "gpu",
        "device": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "sm_count": properties.multi_processor_count,
        "threads_per_sm": properties.max_threads_per_multi_processor,
        "torch": torch.__version__,
    }


def warm_up() -> None:
    """Make what is made once: workspaces of cuBLAS."""
    torch.backends.cudnn.enabled = False
    for dtype in (torch.float32, torch.bfloat16):  # cuBLAS makes its workspace now
        one = torch.ones(8, 8, device="cuda", dtype=dtype)
        torch.mm(one, one)


def record(family: str, card: str) -> None:
    """Add this card's requests to the recording of a family."""
    path = RECORDINGS / f"{family}.json"
    old = json.loads(path.read_text("utf-8")) if path.exists() else {}
    known = {json.dumps(row[:3]): row[3] for row in old.get("cases", [])}
    rows = []
    for call in FAMILIES[family]():
        op, args, kwargs = encode(call)
        before = known.get(json.dumps([op, args, kwargs]), {})
        requests = try_requests(op, args, kwargs)
        if before or requests is not None:  # else no card has such a kernel
            rows.append([op, args, kwargs, with_card(before, card, requests)])
    cards = old.get("cards", {}) | {card: card_properties()}
    write(path, cards, rows)


def with_card(
    before: dict[str, list[int] | None], card: str, requests: list[int] | None
) -> dict[str, list[int] | None]:
    """Return the requests by cards; cards with the same ones share a key: "t4 h100"."""
    result: dict[str, list[int] | None] = {}
    for names, old in [*before.items(), (card, requests)]:
        others = [name for name in names.split() if name != card or old is requests]
        same = next((key for key, known in result.items() if known == old), None)
        if same is not None:
            result[" ".join([*same.split(), *others])] = result.pop(same)
        elif others:
            result[" ".join(others)] = old
    return result


def write(path: Path, cards: dict[str, Any], rows: list[list[Any]]) -> None:
    """Write a recording: one case a line."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    text = f'{{"cards": {json.dumps(cards, indent=1)},\n"cases": [\n{lines}\n]}}\n'
    path.write_text(text, "utf-8")


def main() -> None:
    """Record one family on this machine's card."""
    parser = argparse.ArgumentParser(description="Record the requests of single ops.")
    parser.add_argument("card")
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    options = parser.parse_args()
    warm_up()
    gc.disable()
    for family in options.families or FAMILIES:
        record(family, options.card)


if __name__ == "__main__":
    main()
