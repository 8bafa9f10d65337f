"""A training loop of your own, by a plan: plan -> loop -> verify.

    python examples/plain_loop.py

Plans a small network for a card that need not be here, trains it with an ordinary loop
on whatever device there is, and checks at the end that the plan changes memory only.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
from torch import nn

import budgetfit

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 256
CLASSES = 8


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block finds."""
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(hidden))


class Network(nn.Module):
    """Eight blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for each class."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(
    outputs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return the loss: budgetfit calls it with the outputs and the whole batch."""
    return nn.functional.cross_entropy(outputs.float(), batch["label"])


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with a learning rate for training from nothing."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def main() -> None:
    """Plan, train, verify."""
    options = parse_options()
    torch.manual_seed(options.seed)
    model = Network()
    batches = random_batches()

    # Any batch size serves as the example: the plan's own is solved for, or asked for.
    plan = budgetfit.plan(
        model,
        options.vram,
        gpu=options.gpu,
        batch=next(batches),
        loss=cross_entropy,
        optimizer=make_optimizer,
        batch_size=32,
        effective_batch_size=64,
        precision="fp32",
        checkpointing="full",
    )
    peak = plan.estimate.reserved_bytes / 2**20
    kept = len(plan.model.blocks) - len(plan.recipe.wrapped_blocks)
    print(f"planned for {plan.gpu.title}: peak {peak:.0f} MiB reserved, no GPU used")
    print(f"{kept} of {len(plan.model.blocks)} blocks keep their activations")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    accumulation = plan.recipe.gradient_accumulation_steps
    with budgetfit.apply(plan, model.to(device)) as run:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            run.optimizer, options.steps
        )
        for step in range(1, options.steps + 1):
            losses = [
                run.step(next(batches), max_grad_norm=1.0) for _ in range(accumulation)
            ]
            schedule.step()
            if step % 10 == 0 or step == 1:
                loss = torch.stack(losses).mean().item()
                print(f"step {step:3}  loss {loss:.4f}", flush=True)

    # Behind the loop the model is plain again, and has kept what it learned.
    check = budgetfit.verify(plan, model, device=device)
    print(str(check).splitlines()[0])


def random_batches(size: int = 32) -> Iterator[dict[str, torch.Tensor]]:
    """Yield noise around a centre for each class, for ever."""
    centres = torch.randn(CLASSES, WIDTH)
    while True:
        label = torch.randint(CLASSES, (size,))
        yield {"x": centres[label] + 10 * torch.randn(size, WIDTH), "label": label}


def parse_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="rtx-4090", help="card to plan for")
    parser.add_argument("--vram", help="limit, for example 2GB")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
