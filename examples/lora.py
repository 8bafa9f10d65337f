"""Plan LoRA and QLoRA for a large model, then train a small one's adapters by a plan.

    python examples/lora.py --steps 20

First for a model that this machine need not hold: what an 8 B-parameter model takes
with each method on a card. Then a small model is planned, adapted and trained here.
Needs peft and bitsandbytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

import budgetfit

LENGTH = 128
HERE = Path(__file__)


def main() -> None:
    """Compare methods on a large model, then train a small one."""
    options = parse_options()
    large = str(HERE.parent / "configs" / "Llama-3.1-8B")
    recipe = budgetfit.Recipe(batch_size=1, precision="bf16-mixed")
    for method in ("lora", "qlora"):
        estimate = budgetfit.estimate(
            large, recipe, gpu=options.gpu, max_length=1024, method=method
        )
        gib = estimate.reserved_bytes / 2**30
        print(f"Llama-3.1-8B, {method} r=16, one sample of 1024: {gib:.1f} GiB")

    torch.manual_seed(0)
    model = make_model()
    pretrain(model, HERE.read_bytes())
    plan = budgetfit.plan(
        model,
        gpu=None if torch.cuda.is_available() else options.gpu,
        max_length=LENGTH,
        batch_size=8,
        method="lora",
        lora_r=8,
        optimizer=make_optimizer,
    )
    other = (HERE.parent / "configs" / "README.md").read_bytes()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with budgetfit.apply(plan, model.to(device)) as run:
        trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        print(f"{trained:,} parameters are trained")
        for step in range(1, options.steps + 1):
            batch = random_batch(other, plan.recipe.batch_size)
            loss = run.step(batch, max_grad_norm=1.0)
            if step % 5 == 0:
                print(f"step {step}  loss {float(loss):.4f}", flush=True)


def random_batch(text: bytes, size: int) -> dict[str, torch.Tensor]:
    """Return random pieces of a text."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(tokens) - LENGTH, (size, 1))
    ids = tokens[starts + torch.arange(LENGTH)]
    return {"input_ids": ids, "labels": ids}


def pretrain(model: torch.nn.Module, text: bytes) -> None:
    """Train all weights a little: adapters need a base that knows something."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        model(**random_batch(text, 8)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def make_model() -> transformers.LlamaForCausalLM:
    """Return a small Llama over bytes."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with a learning rate for adapters."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def parse_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="rtx-4090", help="card to plan for")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
