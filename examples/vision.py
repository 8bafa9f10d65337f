"""Train a small vision transformer by a plan, on pictures made here.

    python examples/vision.py --batch-size 16

Asks for the largest batch in a small budget with and without checkpointing, which is
what a plan is for, then trains on whatever device there is.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
import transformers

import budgetfit

if TYPE_CHECKING:
    from collections.abc import Iterator

PIXELS = 32
CLASSES = 4


def main() -> None:
    """Compare, plan, train, evaluate."""
    options = parse_options()
    torch.manual_seed(options.seed)
    model = make_model()
    card = {"gpu": options.gpu, "vram": options.vram}

    for checkpointing in ("none", "full"):
        largest = budgetfit.plan(
            model, **card, checkpointing=checkpointing, objective="batch_size"
        )
        size = largest.recipe.batch_size
        print(f"checkpointing={checkpointing!r}: up to {size:,} pictures at once")

    plan = budgetfit.plan(
        model,
        **card,
        batch_size=options.batch_size,
        checkpointing="full",
        precision="fp32",
        optimizer=make_optimizer,
    )
    print(str(plan).split("\n\n")[1])  # what is recommended

    device = "cuda" if torch.cuda.is_available() else "cpu"
    pictures = striped_pictures(plan.recipe.batch_size)
    with budgetfit.apply(plan, model.to(device)) as run:
        for step in range(1, options.steps + 1):
            loss = run.step(next(pictures))
            if step % 10 == 0 or step == 1:
                print(f"step {step:3}  loss {float(loss):.4f}", flush=True)
    print(f"accuracy on new pictures: {accuracy(model.eval(), pictures):.0%}")


def make_model() -> transformers.ViTForImageClassification:
    """Return a vision transformer for small pictures."""
    config = transformers.ViTConfig(
        image_size=PIXELS,
        patch_size=8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=CLASSES,
    )
    return transformers.ViTForImageClassification(config)


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with a learning rate for training from nothing."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def striped_pictures(size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield pictures with noisy stripes, for ever; how many stripes is the class."""
    positions = torch.linspace(0, 2 * torch.pi, PIXELS)
    while True:
        labels = torch.randint(CLASSES, (size,))
        waves = torch.sin(positions * (labels[:, None] + 1))
        picture = waves[:, None, None, :].expand(size, 3, PIXELS, PIXELS)
        noise = 0.5 * torch.randn(size, 3, PIXELS, PIXELS)
        yield {"pixel_values": picture + noise, "labels": labels}


@torch.no_grad()
def accuracy(
    model: transformers.ViTForImageClassification,
    pictures: Iterator[dict[str, torch.Tensor]],
) -> float:
    """Return the share of one batch that is told right."""
    batch = next(pictures)
    logits = model(batch["pixel_values"].to(model.device)).logits
    return (logits.argmax(-1).cpu() == batch["labels"]).float().mean().item()


def parse_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="rtx-4090", help="card to plan for")
    parser.add_argument("--vram", default="1GiB", help="limit, for example 2GB")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
