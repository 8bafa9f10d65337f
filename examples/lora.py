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
    for method in ("lora", "qlora"):
        plan = budgetfit.plan(
            large,
            gpu=options.gpu,
            max_length=2048,
            method=method,
            batch_size=1,
            objective="memory",
        )
        gib = plan.estimate.reserved_bytes / 2**30
        print(
            f"Llama-3.1-8B, {method} r=16, one sample of 2048: {gib:.1f} GiB at least"
        )

    torch.manual_seed(0)
    model = make_model()
    plan = budgetfit.plan(
        model,
        gpu=None if torch.cuda.is_available() else options.gpu,
        max_length=LENGTH,
        batch_size=8,
        method="lora",
        lora_r=8,
        optimizer=make_optimizer,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.frombuffer(bytearray(HERE.read_bytes()), dtype=torch.uint8).long()
    with budgetfit.apply(plan, model.to(device)) as run:
        trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        print(f"{trained:,} parameters are trained")
        for step in range(1, options.steps + 1):
            starts = torch.randint(len(tokens) - LENGTH, (plan.recipe.batch_size, 1))
            ids = tokens[starts + torch.arange(LENGTH)]
            loss = run.step({"input_ids": ids, "labels": ids}, max_grad_norm=1.0)
            if step % 5 == 0:
                print(f"step {step}  loss {float(loss):.4f}", flush=True)


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
    return torch.optim.AdamW(parameters, lr=3e-3)


def parse_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="rtx-4090", help="card to plan for")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
