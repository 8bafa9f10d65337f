"""Loss curves of planned training against the plain PyTorch loop's.

    python -m tests.accuracy.training_curves            # 50 steps of a small GPT-2
    python -m tests.accuracy.training_curves --steps 10

The plain loop is written out here and shares nothing with ``budgetfit.Run``.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment

BLOCKS, LENGTH, VOCABULARY, BATCH = 6, 32, 128, 16
RATE = 1e-3


@dataclass(frozen=True)
class Curve:
    """Losses of one way to train, and how far they are from the plain loop's."""

    name: str
    losses: list[float]
    plain: list[float]

    @property
    def largest_difference(self) -> float:
        """Relative to the plain loss of the same step."""
        pairs = zip(self.losses, self.plain, strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)


def make_model(dropout: float) -> nn.Module:
    """Return a small GPT-2, always with the same weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=BLOCKS,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config).train()


def make_batches(steps: int, *, padded: bool) -> list[dict[str, torch.Tensor]]:
    """Return sequences that can be learnt; padded ones end at different lengths."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        ids = (starts + torch.arange(LENGTH)) % VOCABULARY
        labels = ids.clone()
        if padded:
            ends = torch.randint(4, LENGTH, (BATCH, 1), generator=generator)
            labels[torch.arange(LENGTH) >= ends] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def train_plainly(
    batches: list[dict[str, torch.Tensor]], dropout: float
) -> list[float]:
    """Train as the PyTorch tutorial does."""
    model = make_model(dropout)
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, weight_decay=0.0, fused=True
    )
    torch.manual_seed(2)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_by_recipe(
    batches: list[dict[str, torch.Tensor]],
    dropout: float,
    *,
    segments: tuple[Segment, ...] = (),
    micro_batches: int = 1,
    tokens: bool = False,
) -> list[float]:
    """Train with ``Run``; return the loss of each step, the mean of its group."""
    recipe = Recipe(
        batch_size=BATCH // micro_batches,
        gradient_accumulation_steps=micro_batches,
        segments=segments,
    )
    run = Run(make_model(dropout), recipe, learning_rate=RATE)
    torch.manual_seed(2)
    losses = []
    for batch in batches:
        items = int((batch["labels"][:, 1:] != -100).sum()) if tokens else None
        parts = [
            run.step(part, 1.0, num_items_in_batch=items).item()
            for part in run.parts(batch)
        ]
        losses.append(sum(parts) if tokens else sum(parts) / len(parts))
    return losses


def curves(steps: int) -> list[Curve]:
    """Train in every way and pair the losses with the plain loop's."""
    names = [f"transformer.h.{index}" for index in range(BLOCKS)]
    single = tuple(Segment((name,)) for name in names[:4])
    mixed = (
        Segment(tuple(names[:3]), nested=True),
        Segment((names[3],), mode="offload"),
        Segment((names[4],), mode="selective", saved_ops=("aten.addmm.default:0",)),
    )
    batches = make_batches(steps, padded=False)
    padded = make_batches(steps, padded=True)
    dropout, still = train_plainly(batches, 0.1), train_plainly(batches, 0.0)
    uneven = train_plainly(padded, 0.0)

    def run(plain: list[float], name: str, **options: Any) -> Curve:
        data = padded if plain is uneven else batches
        rate = 0.1 if plain is dropout else 0.0
        return Curve(name, train_by_recipe(data, rate, **options), plain)

    return [
        run(dropout, "dropout, nothing recomputed"),
        run(dropout, "dropout, 4 of 6 blocks recomputed", segments=single),
        run(dropout, "dropout, nested, offloaded and selective", segments=mixed),
        run(still, "4 micro-batches", micro_batches=4, segments=single),
        run(uneven, "4 of uneven lengths, by tokens", micro_batches=4, tokens=True),
    ]


def main() -> None:
    """Print how far each curve is from the plain one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(f"{options.steps} steps of a small GPT-2, fp32, AdamW, clipped to norm 1\n")
    print(f"{'':42}{'first':>9}{'last':>9}   largest relative difference")
    for curve in curves(options.steps):
        difference = curve.largest_difference
        shown = "none, to the bit" if difference == 0 else f"{difference:.1e}"
        print(f"{curve.name:42}{curve.losses[0]:9.4f}{curve.losses[-1]:9.4f}   {shown}")


if __name__ == "__main__":
    main()
