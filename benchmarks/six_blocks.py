"""Six blocks that all differ: the plan against the best of all 64 subsets.

    python -m benchmarks.six_blocks

Each subset keeps some blocks and recomputes the others one by one, which is all that a
flag per block can say. Every subset is traced and judged as the plan is. Ten budgets,
from the least that any subset takes to what keeping everything takes.
"""

import itertools
import sys
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from benchmarks.shared import MIB, quiet, side_by_side, table
from budgetfit import Estimate

WIDTHS: Final = (768, 1024, 512, 1536, 640, 1280)
INNER: Final = (3072, 2048, 4096, 3072, 2560, 1280)
HEADS: Final = 8
TOKENS: Final = 1024
BATCH_SIZE: Final = 8
CLASSES: Final = 1000
GPU: Final = "rtx-4090"
PRECISION: Final = "bf16-mixed"
BUDGETS: Final = 10


class Block(nn.Module):
    """A transformer block that also changes the width."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, inner)
        self.narrow = nn.Linear(inner, width)
        self.out = nn.Linear(width, out)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[samples, tokens, out]`` of ``[samples, tokens, width]``."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        hidden = hidden + self.merge(mixed.transpose(1, 2).flatten(-2))
        wide = functional.gelu(self.wide(self.norm(hidden)))
        return self.out(hidden + self.narrow(wide))


class SixBlocks(nn.Module):
    """Six blocks of six widths, and a small classifier per token."""

    def __init__(self) -> None:
        super().__init__()
        outs = (*WIDTHS[1:], WIDTHS[0])
        self.blocks = nn.ModuleList(map(Block, WIDTHS, INNER, outs))
        self.head = nn.Linear(WIDTHS[0], CLASSES)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token."""
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return a loss that needs no labels."""
    return functional.cross_entropy(
        logits.flatten(0, 1), logits.new_zeros(logits[..., 0].numel(), dtype=torch.long)
    )


def problem() -> tuple[nn.Module, torch.Tensor]:
    """Return the model, on meta, and a batch."""
    with torch.device("meta"):
        model = SixBlocks()
    return model, torch.zeros(BATCH_SIZE, TOKENS, WIDTHS[0])


def judged_subset(recomputed: tuple[int, ...]) -> Estimate:
    """Return the judge's word on recomputing these blocks, one by one."""
    from budgetfit import Recipe, Segment, estimate

    model, batch = problem()
    recipe = Recipe(
        batch_size=BATCH_SIZE,
        precision=PRECISION,
        segments=tuple(Segment((f"blocks.{number}",)) for number in recomputed),
    )
    return estimate(model, recipe, gpu=GPU, batch=batch, loss=loss)


def planned(usable_bytes: int) -> Estimate:
    """Return the judge's word on the plan for so many bytes of allocator memory."""
    from budgetfit import plan
    from budgetfit.inputs.target_gpu import find_target_gpu

    model, batch = problem()
    made = plan(
        model,
        # The context comes on top, as no subset's peak has it.
        usable_bytes + find_target_gpu(None, GPU).context_bytes,
        gpu=GPU,
        headroom=0,
        batch=batch,
        loss=loss,
        batch_size=BATCH_SIZE,
        # As the subsets: without it, plans have room for accumulated gradients.
        effective_batch_size=BATCH_SIZE,
        precision=PRECISION,
    )
    return made.estimate


def words(estimate: Estimate) -> str:
    """Return a letter per block: kept, recomputed, selective, offloaded.

    Blocks of one segment stand in brackets.
    """
    letters = {f"blocks.{number}": "k" for number in range(len(WIDTHS))}
    for segment in estimate.recipe.segments:
        for name in segment.blocks:
            letters[name] = segment.mode[0]
        if len(segment.blocks) > 1:
            letters[segment.blocks[0]] = "[" + letters[segment.blocks[0]]
            letters[segment.blocks[-1]] += "]"
    chunks = estimate.recipe.loss_chunks
    return "".join(letters.values()) + (f" loss in {chunks}" if chunks > 1 else "")


def main() -> int:
    """Print a line per budget and the verdict."""
    quiet()
    subsets = [
        each
        for count in range(len(WIDTHS) + 1)
        for each in itertools.combinations(range(len(WIDTHS)), count)
    ]
    judged: list[Estimate] = side_by_side(judged_subset, [(each,) for each in subsets])
    least = min(each.reserved_bytes for each in judged)
    most = judged[0].reserved_bytes
    budgets = [
        least + (most - least) * step // (BUDGETS - 1) for step in range(BUDGETS)
    ]
    plans: list[Estimate] = side_by_side(planned, [(each,) for each in budgets])
    rows, slower, faster = [], 0, 0
    for budget, ours in zip(budgets, plans, strict=True):
        fitting = [each for each in judged if each.reserved_bytes <= budget]
        best = min(fitting, key=lambda each: (each.step_ms, each.reserved_bytes))
        slower += ours.step_ms > best.step_ms
        faster += ours.step_ms < best.step_ms
        rows.append(
            (
                f"{budget / MIB:,.0f}",
                words(best),
                f"{best.step_ms:.2f}",
                f"{best.reserved_bytes / MIB:,.0f}",
                words(ours),
                f"{ours.step_ms:.2f}",
                f"{ours.reserved_bytes / MIB:,.0f}",
                "yes" if ours.reserved_bytes <= budget else "NO",
                f"{best.step_ms / ours.step_ms - 1:+.2%}",
            )
        )
    headers = (
        "budget MiB",
        "best subset",
        "ms",
        "MiB",
        "plan",
        "ms",
        "MiB",
        "within",
        "faster by",
    )
    print(table(headers, rows, left=0))
    print(
        f"\n* {len(judged)} subsets judged. The plan is slower at {slower} of "
        f"{BUDGETS} budgets, faster at {faster}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
