"""Compiled steps that others published: speed-ups and reserved memory, predicted.

Most publish the whole model compiled, head and loss included; speed-ups are predicted
for compiled blocks. torchtune compiles blocks and the loss, torchtitan blocks; its
steps are of several GPUs, whose communication is not predicted.

Reserved memory: GPT-2 124M of LLMs-from-scratch (ch05/10, sections 7 to 10, commit
28c65cd) in bf16 on an A100 with torch 2.6, evaluated now and then; predicted for the
training steps alone and for torch 2.13, without the emptied cache after compiling that
is budgetfit's own. With a vocabulary of 50,257 inductor pads the product of the head,
which the prediction does not (``shape_padding``).

python -m benchmarks.compiled_steps
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal
from unittest.mock import patch

import torch

import budgetfit
from benchmarks.published_steps.models import build
from benchmarks.shared import table
from budgetfit.core.recipe import Recipe
from budgetfit.traces import session

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Published:
    """A step with and without torch.compile, on one kind of GPU.

    Attributes:
        what: Model, precision and batch.
        source: Where the speed-up is from.
        compiled: What was compiled.
        speedup: Time without by time with compile.
        gpu: budgetfit's name.
        model: Class and config, and the config's settings.
        batch_size, max_length: Of the step.
        precision: In budgetfit's words.
    """

    what: str
    source: str
    compiled: str
    speedup: float
    gpu: str
    model: tuple[str, str, dict[str, Any]]
    batch_size: int
    max_length: int
    precision: str


_GPT2: Final = ("GPT2LMHeadModel", "GPT2Config", {"use_cache": False})
_PADDED: Final = (_GPT2[0], _GPT2[1], {"use_cache": False, "vocab_size": 50304})
_LLAMA_8B: Final = (
    "LlamaForCausalLM",
    "LlamaConfig",
    {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "use_cache": False,
    },
)
_LLAMA_3B: Final = (
    "LlamaForCausalLM",
    "LlamaConfig",
    {
        "vocab_size": 128_256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
        "use_cache": False,
    },
)
ROWS: Final = (
    Published(
        what="GPT-2 124M, bf16-mixed, 12 x 1,024",
        source="nanoGPT README: 250 to 135 ms",
        compiled="model",
        speedup=250 / 135,
        gpu="a100-40gb",
        model=_PADDED,
        batch_size=12,
        max_length=1024,
        precision="bf16-mixed",
    ),
    Published(
        what="GPT-2 124M, bf16, 8 x 1,024, vocabulary 50,257",
        source="rasbt ch05/10: 91,901 to 112,046 tokens/s",
        compiled="model",
        speedup=112_046 / 91_901,
        gpu="a100-40gb",
        model=_GPT2,
        batch_size=8,
        max_length=1024,
        precision="bf16",
    ),
    Published(
        what="Llama 3.2 3B, bf16, 2 x 4,096",
        source="torchtune README: 7,075 to 8,998 tokens/s",
        compiled="blocks and loss",
        speedup=8998 / 7075,
        gpu="a100-80gb",
        model=_LLAMA_3B,
        batch_size=2,
        max_length=4096,
        precision="bf16",
    ),
    Published(
        what="Llama 3.1 8B, bf16-mixed, 2 x 8,192, 8 GPUs, selective checkpointing",
        source="torchtitan 2024-12, table 1: 5,762 to 6,667 tokens/s",
        compiled="blocks",
        speedup=6667 / 5762,
        gpu="h100-80gb",
        model=_LLAMA_8B,
        batch_size=2,
        max_length=8192,
        precision="bf16-mixed",
    ),
)


# Vocabulary, batch size, compiled, GiB reserved.
RESERVED: Final[tuple[tuple[int, int, Literal["none", "model"], float], ...]] = (
    (50257, 8, "none", 5.9004),
    (50257, 8, "model", 6.1875),
    (50304, 8, "model", 5.8906),
    (50304, 32, "model", 22.5078),
)
GIB: Final = 2**30


def reserved_rows() -> list[tuple[str, ...]]:
    """Return the rows of reserved memory, predicted beside published."""
    rows = []
    for vocabulary, batch_size, mode, published in RESERVED:
        spec = {"kind": "gpt", "L": 12, "d": 768, "h": 12, "T": 1024, "drop": 0.1}
        spec |= {"V": vocabulary, "qkv_bias": False, "tie": False}
        model, batch, loss = build(spec)
        recipe = Recipe(batch_size=batch_size, precision="bf16", compile=mode)
        with patch.object(session, "with_emptied_cache", lambda trace: trace):
            found = budgetfit.estimate(
                model, recipe, gpu="a100-40gb", batch=batch, loss=loss
            )
        ours = found.reserved_bytes / GIB
        rows.append(
            (
                f"{batch_size} x 1,024, vocabulary {vocabulary:,}",
                mode,
                f"{published:.4f}",
                f"{ours:.4f}",
                f"{ours / published - 1:+.2%}",
            )
        )
    return rows


def predicted(row: Published) -> float:
    """Return the predicted speed-up with each block compiled."""
    model = _model(row)
    eager_ms, compiled_ms = (
        budgetfit.estimate(
            model,
            Recipe(
                batch_size=row.batch_size,
                precision=row.precision,
                compile=mode,  # type: ignore[arg-type]
            ),
            gpu=row.gpu,
            max_length=row.max_length,
        ).step_ms
        for mode in ("none", "blocks")
    )
    return eager_ms / compiled_ms


def _model(row: Published) -> nn.Module:
    import transformers

    builder, config, settings = row.model
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, builder)(
            getattr(transformers, config)(**settings)
        )
    return model


def main() -> None:
    """Print each published speed-up beside the predicted one."""
    warnings.simplefilter("ignore")
    rows = []
    for row in ROWS:
        ours = predicted(row)
        rows.append(
            (
                row.what,
                row.source,
                row.compiled,
                f"{row.speedup:.2f}",
                f"{ours:.2f}",
                f"{ours / row.speedup - 1:+.0%}",
            )
        )
    head = ("step", "source", "compiled", "published", "predicted, blocks", "off by")
    sys.stdout.write(table(head, rows) + "\n\n")
    head = ("step", "compiled", "published GiB", "predicted GiB", "off by")
    sys.stdout.write(table(head, reserved_rows()) + "\n")


if __name__ == "__main__":
    main()
