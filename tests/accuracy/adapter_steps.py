"""Predicted against PyTorch's CUDA host code: peaks of LoRA and QLoRA steps.

Run ``python -m tests.accuracy.adapter_steps`` on an RTX 4090, or as the program of
``tests.accuracy.nulldriver.run``, with peft and bitsandbytes on its path.
The null driver computes nothing, so attention is eager: what depends on the values of a
mask would differ, and LLM.int8() finds no outliers there.
"""

import gc
import warnings
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import budgetfit
from budgetfit.applying.run.run import Run
from budgetfit.core.adapter import parse_adapter
from budgetfit.integrations.peft import attach_adapters
from budgetfit.planning.profiling.block_chain import checkpoint_every_block

LENGTH, SAMPLES, LAYERS, STEPS = 512, 4, 4, 3  # more tokens than bitsandbytes fuses
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"method": "lora"},
    "lora, dropout": {"method": "lora", "lora_dropout": 0.1},
    "qlora": {"method": "qlora"},
    "qlora, not prepared": {"method": "qlora", "prepare_for_kbit": False},
    "qlora, flat": {"method": "qlora", "double_quantization": False},
    "lora on int8": {"method": "lora", "quantization": "int8"},
}


def config() -> LlamaConfig:
    """Return a small Llama in bf16."""
    return LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2000,
        tie_word_embeddings=False,
        dtype="bfloat16",
        use_cache=False,
        attn_implementation="eager",
        architectures=["LlamaForCausalLM"],
    )


def compare(
    asked: dict[str, Any], precision: str, *, recomputed: bool, gpu: str
) -> tuple[int, int]:
    """Return predicted and measured peaks of allocated bytes over three steps."""
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    adapter = parse_adapter(**asked) if asked else None
    model = LlamaForCausalLM._from_config(config(), dtype=torch.bfloat16)
    live = model.cuda() if adapter is None else attach_adapters(model, adapter, "cuda")
    above = "" if adapter is None else "base_model.model."
    blocks = tuple(f"{above}model.layers.{layer}" for layer in range(LAYERS))
    recipe = budgetfit.Recipe(
        batch_size=SAMPLES,
        precision=precision,
        segments=checkpoint_every_block(blocks) if recomputed else (),
    )
    predicted = budgetfit.estimate(config(), recipe, gpu=gpu, batch=batch, **asked)
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = Run(live, recipe)
    for _ in range(STEPS):
        run.step({name: tensor.cuda() for name, tensor in batch.items()})
    return predicted.allocated_bytes, torch.cuda.max_memory_allocated()


def main(gpu: str = "rtx-4090") -> None:
    """Print the table for the card that ``gpu`` names."""
    warnings.simplefilter("ignore")
    errors = []
    for precision in ("bf16-mixed", "as-is"):
        for name, asked in CASES.items():
            for recomputed in (False, True):
                predicted, measured = compare(
                    asked, precision, recomputed=recomputed, gpu=gpu
                )
                errors.append(predicted / measured - 1)
                blocks = "recomputed" if recomputed else "kept"
                print(
                    f"{precision:12}{name:22}{blocks:12}{predicted:>14,}"
                    f"{measured:>14,}{errors[-1]:>+9.2%}",
                    flush=True,
                )
                gc.collect()
    print(f"{len(errors)} cases, from {min(errors):+.2%} to {max(errors):+.2%}")


if __name__ == "__main__":
    main()
