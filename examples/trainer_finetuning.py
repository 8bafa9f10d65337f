"""Fine-tune with transformers' Trainer by a plan, and count what it recomputes.

    python examples/trainer_finetuning.py --vram 0.77GB --steps 10

The plan's settings become TrainingArguments; a callback sets up the blocks. Without a
CUDA device it is planned for the card that --gpu names and trains on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from pathlib import Path

import torch
import transformers

import budgetfit

LENGTH = 128  # bytes in one sample: the vocabulary is the 256 bytes
TEXT = Path(__file__).read_bytes()


def main() -> None:
    """Plan, train, count."""
    options = parse_options()
    torch.manual_seed(0)
    model = make_model()
    plan = budgetfit.plan(
        model,
        options.vram,
        gpu=None if torch.cuda.is_available() else options.gpu,
        max_length=LENGTH,
        batch_size=4,
        effective_batch_size=8,
        precision="fp32",
        host_ram=0,  # recompute, which is counted below, and offload nothing
    )
    print(plan)

    counts = count_forwards(model, [*plan.model.blocks])
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                use_cpu=not torch.cuda.is_available(),
                **plan.to_training_arguments(learning_rate=1e-3),
            ),
            train_dataset=Pieces(TEXT),
            callbacks=[plan.trainer_callback()],
        )
        trainer.train()

    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")
    once = options.steps * plan.recipe.gradient_accumulation_steps
    again = [name for name, count in counts.items() if next(count) > once]
    print(f"blocks that ran twice per step: {len(again)}, as planned: ", end="")
    print(sorted(again) == sorted(plan.recipe.wrapped_blocks))


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


class Pieces(torch.utils.data.Dataset):
    """A text cut into samples of the planned length."""

    def __init__(self, text: bytes) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.tokens) - LENGTH

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[start : start + LENGTH]
        return {"input_ids": piece, "labels": piece}


def count_forwards(
    model: torch.nn.Module, blocks: list[str]
) -> dict[str, itertools.count[int]]:
    """Return what counts how often each block's insides ran; ``next`` reads it."""
    counts = {name: itertools.count() for name in blocks}

    def count(name: str, *_: object) -> None:
        next(counts[name])  # a recomputation puts back other changes, but no iterator

    for name in blocks:
        # On a part of the block: a checkpoint runs the block's parts again, not the
        # hooks of the block itself.
        part = next(model.get_submodule(name).children())
        part.register_forward_pre_hook(functools.partial(count, name))
    return counts


def parse_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vram", default="0.77GB", help="small on purpose")
    parser.add_argument("--gpu", default="rtx-4090", help="card, where none is here")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
