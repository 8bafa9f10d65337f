"""What `make demo` runs: plan a large model for a card, then train a small one here.

Needs no GPU and no network. Every number that it prints is computed in this run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import transformers

import budgetfit

LARGE = Path(__file__).parent / "configs" / "SmolLM2-1.7B"
CARD = "rtx-4090"
STEPS = 6


def main() -> None:
    """Plan, then plan, apply and verify."""
    transformers.logging.set_verbosity_error()
    plan_a_large_model()
    train_a_small_model()


def plan_a_large_model() -> None:
    """Find settings for 1.7 B parameters on a card that is not here."""
    headline(f"1. The fastest way to train {LARGE.name} on an {CARD}")
    started = time.perf_counter()
    plan = budgetfit.plan(
        str(LARGE),
        gpu=CARD,
        # With fp32 weights, as in bf16-mixed, AdamW alone would overfill this card;
        # `budgetfit plan` says so and suggests this. It changes training, so it must be
        # asked for.
        precision="bf16",
        max_length=4096,
        effective_batch_size=32,
        progress=say,
    )
    print(plan)
    print(f"\nPlanned in {time.perf_counter() - started:.1f} s.")


def train_a_small_model() -> None:
    """Plan a small GPT-2, really train it that way, and check the prediction."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    headline(f"2. A small GPT-2, planned for the lowest peak and trained on {device}")
    torch.manual_seed(0)
    model = small_gpt2()
    plan = budgetfit.plan(
        model,
        gpu=None if device == "cuda" else CARD,
        batch_size=8,
        effective_batch_size=16,
        objective="memory",
        progress=say,
    )
    recipe = plan.recipe
    checkpointed = f"{len(recipe.wrapped_blocks)} of {len(plan.model.blocks)}"
    print(
        f"batch_size {recipe.batch_size} x {recipe.gradient_accumulation_steps}, "
        f"{recipe.precision}, {checkpointed} blocks checkpointed: "
        f"peak {mib(plan.estimate.allocated_bytes)}"
    )
    for other in plan.alternatives:
        print(f"  {other.label}: peak {mib(other.estimate.allocated_bytes)}")

    headline("3. Training by that plan")
    data = torch.arange(64).repeat(8, 2)  # sequences that a model can learn
    with budgetfit.apply(plan, model.to(device)) as run:
        for step in range(1, STEPS + 1):
            losses = []
            for _ in range(recipe.gradient_accumulation_steps):
                batch = data.roll(int(torch.randint(64, ())), dims=1)
                loss = run.step({"input_ids": batch, "labels": batch})
                losses.append(float(loss))
            print(f"step {step}  loss {sum(losses) / len(losses):.4f}")

    headline("4. Real steps against the prediction")
    print(budgetfit.verify(plan, model, device=device, progress=say))


def small_gpt2() -> transformers.GPT2LMHeadModel:
    """Return a GPT-2 of 8 small blocks with random weights."""
    config = transformers.GPT2Config(
        n_layer=8,
        n_embd=128,
        n_head=4,
        n_positions=128,
        vocab_size=512,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def mib(size_bytes: int) -> str:
    """Write a size."""
    return f"{size_bytes / 2**20:.1f} MiB allocated"


def headline(text: str) -> None:
    """Print what comes next."""
    print(f"\n{text}\n{'=' * len(text)}\n", flush=True)


def say(text: str) -> None:
    """Show progress: planning the large model takes some seconds."""
    print(f"  ... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
