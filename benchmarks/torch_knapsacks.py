"""torch's knapsacks and the planner's op sets on the same items.

    python -m benchmarks.torch_knapsacks

Which op outputs should 24 equal blocks save, in so many bytes? torch's partitioner asks
one of its knapsacks about all ops of a graph at once. The planner finds a few sets for
a block, and each block takes one of them, or is kept or recomputed whole. Items are the
ops of a real transformer block, and made ones. 100 % is what fractions of items would
reach, which nothing can exceed: more means that the capacity was exceeded.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch._functorch._activation_checkpointing import knapsack
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.shared import config, quiet, table
from budgetfit.gpus.table import find_gpu
from budgetfit.solvers.op_knapsack import OpItem, pareto_op_sets

BLOCKS: Final = 24
SHARES: Final = (0.1, 0.25, 0.5, 0.75)
FEW, MANY = 3, 24  # sets per block type: as many as the planner tries, and more
TORCH: Final = (
    ("greedy", knapsack.greedy_knapsack),
    ("dp (default)", knapsack.dp_knapsack),
    ("ilp", knapsack.ilp_knapsack),
    ("dp, sliding", knapsack.dp_knapsack_sliding_hirschberg),
)


class Answer(NamedTuple):
    """What one of them chose: time saved, bytes held, seconds it took."""

    saved_ns: int
    held_bytes: int
    seconds: float


class OpRecorder(TorchDispatchMode):
    """Notes what each op makes and how long it takes on a card."""

    def __init__(self, gpu: str) -> None:
        super().__init__()
        self.gpu = find_gpu(gpu)
        self.items: list[OpItem] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run the op and note it, unless it only makes views."""
        out = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if not func.is_view and made:
            read = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
            moved = sum(x.numel() * x.element_size() for x in (*made, *read))
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            rate = self.gpu.bf16_tflops or self.gpu.fp32_tflops
            ns = max(flops / rate / 1e3, moved / self.gpu.memory_gb_per_s)
            held = sum(x.numel() * x.element_size() for x in made)
            self.items.append(OpItem(saved_bytes=held, saved_ns=math.ceil(ns)))
        return out


def block_items(gpu: str = "rtx-4090") -> list[OpItem]:
    """Return the ops of a SmolLM2 block's forward, 4 samples of 2048 tokens in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(config("SmolLM2-1.7B"))
    shape.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        hidden = torch.zeros(4, 2048, shape.hidden_size, dtype=torch.bfloat16)
        positions = torch.arange(2048)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    with torch.no_grad(), OpRecorder(gpu) as recorder:
        model.model.layers[0](hidden, position_embeddings=rotary)
    return recorder.items


def random_items(count: int, seed: int) -> list[OpItem]:
    """Return items whose bytes and times have nothing to do with each other."""
    rnd = random.Random(seed)
    return [
        OpItem(saved_bytes=rnd.randrange(1, 10**8), saved_ns=rnd.randrange(1, 10**6))
        for _ in range(count)
    ]


def small_items(count: int) -> list[OpItem]:
    """Return many equal items, each smaller than what torch's dp rounds to."""
    return [OpItem(saved_bytes=4, saved_ns=7)] * count


def totals(items: Sequence[OpItem]) -> tuple[int, int]:
    """Return the bytes and the nanoseconds of items together."""
    return sum(x.saved_bytes for x in items), sum(x.saved_ns for x in items)


def bound_ns(items: Sequence[OpItem], capacity: int) -> float:
    """Return what fractions of items could save: no choice saves more."""
    saved, left = 0.0, capacity
    for item in sorted(items, key=lambda x: x.saved_bytes / max(x.saved_ns, 1e-9)):
        share = min(1.0, left / item.saved_bytes)
        saved += share * item.saved_ns
        left -= share * item.saved_bytes
    return saved


def ask_torch(solve: Callable[..., Any], block: list[OpItem], capacity: int) -> Answer:
    """Return what one of torch's knapsacks saves of all blocks' items."""
    items = block * BLOCKS
    total, _ = totals(items)
    started = time.perf_counter()
    _, chosen, _ = solve(
        [x.saved_bytes / total for x in items],
        [float(x.saved_ns) for x in items],
        capacity / total,
    )
    seconds = time.perf_counter() - started
    held, saved = totals([items[int(at)] for at in chosen])
    return Answer(saved, held, seconds)


def ask_us(block: list[OpItem], capacity: int, most: int) -> Answer:
    """Return what the planner's sets save when each block takes one of them."""
    started = time.perf_counter()
    sets = [totals([block[at] for at in each]) for each in pareto_op_sets(block, most)]
    best = _spend([(0, 0), *sets, totals(block)], capacity)
    return Answer(*best, time.perf_counter() - started)


def _spend(points: list[tuple[int, int]], capacity: int) -> tuple[int, int]:
    """Give each block one point: from left to right of the hull, while bytes last."""
    best = (0, 0)
    for low, (held, saved) in enumerate(points):
        if BLOCKS * held > capacity:
            break
        for more_held, more_saved in points[low:]:
            extra = more_held - held
            count = min(BLOCKS, (capacity - BLOCKS * held) // extra) if extra else 0
            total = BLOCKS * saved + count * (more_saved - saved)
            best = max(best, (total, BLOCKS * held + count * extra))
    return best


def rows(title: str, block: list[OpItem]) -> list[tuple[str, ...]]:
    """Return a line per solver: its share of the bound at each capacity, its time."""
    total = totals(block * BLOCKS)[0]
    solvers = [
        (f"torch {name}", lambda cap, solve=solve: ask_torch(solve, block, cap))
        for name, solve in TORCH
    ]
    solvers += [
        (f"budgetfit, {most} sets", lambda cap, most=most: ask_us(block, cap, most))
        for most in (FEW, MANY)
    ]
    lines = []
    for name, ask in solvers:
        cells, seconds, over = [], 0.0, 0.0
        for share in SHARES:
            capacity = int(share * total)
            answer = ask(capacity)
            reach = bound_ns(block * BLOCKS, capacity)
            cells.append(f"{answer.saved_ns / reach:.2%}")
            seconds = max(seconds, answer.seconds)
            over = max(over, answer.held_bytes / capacity - 1)
        respected = "yes" if over <= 0 else f"NO, {over:.2%} over"
        lines.append((title, name, *cells, respected, f"{1000 * seconds:,.1f}"))
    return lines


def main() -> int:
    """Print the table."""
    quiet()
    headers = (
        "items",
        "solver",
        *(f"{share:.0%} of bytes" for share in SHARES),
        "capacity kept",
        "ms",
    )
    real = block_items()
    lines = rows(f"SmolLM2 block, {len(real)} ops", real)
    lines += rows("random, 20 a block", random_items(20, 1))
    lines += rows("random, 50 a block", random_items(50, 2))
    lines += rows("equal and small, 200 a block", small_items(200))
    print(table(headers, lines, left=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
