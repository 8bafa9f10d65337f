"""Train a small GPT on text by a plan: plan -> apply -> train -> save -> generate.

    python examples/train_small_gpt.py --vram 2GB --steps 200

On a machine with a CUDA device it is planned for that device and trains there;
elsewhere for the card that --gpu names, and it trains on the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

import budgetfit

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH = 128  # bytes in one sample: the vocabulary is the 256 bytes
HERE = Path(__file__)


def main() -> None:
    """Read the options, plan, train, save."""
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    model = make_model()
    plan = budgetfit.plan(
        model,
        options.vram,
        gpu=options.gpu if device == "cpu" else None,
        batch_size=options.batch_size,
        effective_batch_size=options.effective_batch_size,
        optimizer=make_optimizer,
    )
    print(plan)

    batches = random_batches(options.text.read_bytes(), plan.recipe.batch_size)
    with budgetfit.apply(plan, model.to(device)) as run:
        for step in range(1, options.steps + 1):
            for _ in range(plan.recipe.gradient_accumulation_steps):
                loss = run.step(next(batches), max_grad_norm=1.0)
            print(f"step {step}  loss {float(loss):.4f}", flush=True)
        if options.save:
            torch.save(run.state_dict(), options.save)


def make_model() -> transformers.GPT2LMHeadModel:
    """Return a GPT over bytes."""
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_layer=6,
        n_embd=192,
        n_head=6,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with a learning rate for training from nothing."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def random_batches(text: bytes, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random pieces of the text, for ever."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (batch_size, 1))
        ids = tokens[starts + torch.arange(LENGTH)]
        yield {"input_ids": ids, "labels": ids}


def parse_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=HERE, help="what to learn")
    parser.add_argument("--vram", help="limit, for example 2GB")
    parser.add_argument("--gpu", default="rtx-4090", help="card, where none is here")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--effective-batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the state here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
