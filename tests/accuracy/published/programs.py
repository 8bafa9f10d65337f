"""The program of each published row that can be predicted: model, batch, settings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from tests.accuracy.published import adapters
from tests.accuracy.published.litgpt_model import Gpt, GptShape, LoraLinear
from tests.accuracy.published.rows import Row

LITGPT = {
    "falcon-7b": GptShape(
        layers=32, width=4544, heads=71, groups=1, inner=18176, vocabulary=65024,
        mlp="neox", norm="layer", parallel=True, shared_norm=True,
    ),
    "gemma-2b": GptShape(
        layers=18, width=2048, heads=8, groups=1, head=256, inner=16384,
        vocabulary=256000, mlp="gemma",
    ),
    "gemma-7b": GptShape(
        layers=28, width=3072, heads=16, head=256, inner=24576, vocabulary=256000,
        mlp="gemma",
    ),
    "gemma2-2b": GptShape(
        layers=26, width=2304, heads=8, groups=4, head=256, inner=9216,
        vocabulary=256000, mlp="gemma", sandwich=True, softcapped=True,
    ),
    "gemma2-9b": GptShape(
        layers=42, width=3584, heads=16, groups=8, head=256, inner=14336,
        vocabulary=256000, mlp="gemma", sandwich=True, softcapped=True,
    ),
    "llama-2-7b": GptShape(
        layers=32, width=4096, heads=32, inner=11008, vocabulary=32000
    ),
    "llama-3-8b": GptShape(
        layers=32, width=4096, heads=32, groups=8, inner=14336, vocabulary=128256
    ),
    "llama-3.2-1b": GptShape(
        layers=16, width=2048, heads=32, groups=8, inner=8192, vocabulary=128256
    ),
    "llama-3.2-3b": GptShape(
        layers=28, width=3072, heads=24, groups=8, inner=8192, vocabulary=128256
    ),
    "mistral-7b": GptShape(
        layers=32, width=4096, heads=32, groups=8, inner=14336, vocabulary=32000
    ),
    "phi-2": GptShape(
        layers=32, width=2560, heads=32, inner=10240, vocabulary=51200, mlp="neox",
        norm="layer", bias=True, parallel=True, shared_norm=True, rotary=0.4,
    ),
    "phi-3": GptShape(layers=32, width=3072, heads=32, inner=8192, vocabulary=32064),
    "stablelm-base-alpha-3b": GptShape(
        layers=16, width=4096, heads=32, inner=16384, vocabulary=50688, mlp="neox",
        norm="layer", bias=True, parallel=True, rotary=0.25,
    ),
    "tiny-llama": GptShape(
        layers=22, width=2048, heads=32, groups=4, inner=5632, vocabulary=32000
    ),
}  # fmt: skip
LITGPT["llama-3.1-8b"] = LITGPT["llama-3-8b"]
LITGPT["mistral-7b-v0.2"] = LITGPT["mistral-7b"]
LITGPT_SAMPLES = 8  # of an optimizer step in its recipes
PEFT_LENGTH = 640  # a guess from that table's rows themselves

ALL_LINEAR = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a published run trained, and with what."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    batch_size: int
    precision: str = "as-is"
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw_torch"
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    micro_batches: int = 1
    recompute: bool = False
    assumed: str = ""


def program(row: Row) -> Program:
    """The program of a row that ``rows.no_prediction`` has nothing against."""
    return _GROUPS[row.group](row)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What else may have run, and how that shows in the number."""

    because: str
    program: Program


def alternative(row: Row) -> Alternative | None:
    """Another reading of a row's unknown, where there is one to try.

    Judged only for rows whose first reading misses, and never counted.
    """
    first = program(row)
    if row.group == "LitGPT config hub" and row.method != "full":
        adapters.wrap(first.model, ("proj", "fc_1", "fc_2", "lm_head"), LoraLinear)
        because = "which layers have LoRA is not in the table; on every linear layer"
        return Alternative(because=because, program=first)
    if row.group == "peft MetaMathQA" and row.length != PEFT_LENGTH:
        because = (
            f"how long its long batches are is not stated; with {PEFT_LENGTH} tokens, "
            "which suits all nine rows of that table,"
        )
        other = program(replace(row, length=PEFT_LENGTH))
        return Alternative(because=because, program=other)
    if isinstance(first.model, Head):
        first.model.second = nn.Linear(
            *(first.model.head.in_features, first.model.head.out_features),
            bias=False, device="meta", dtype=torch.bfloat16,
        ).requires_grad_(False)  # fmt: skip
        because = (
            "all four rows differ by the bytes of one head's weights, as if a second "
            "head was alive; with one"
        )
        return Alternative(because=because, program=first)
    return None


def _litgpt(row: Row) -> Program:
    shape = LITGPT[row.label.split("/")[0]]
    size, length = row.batch_size or 1, row.length or 512
    with torch.device("meta"):
        model = Gpt(shape, length, full=row.method == "full").to(torch.bfloat16)
    return Program(
        model=model,
        batch=_text(size, length),
        batch_size=size,
        loss=lambda outputs, _: outputs,
        micro_batches=2 if size < LITGPT_SAMPLES else 1,
    )


def _llama(**sizes: int | bool) -> nn.Module:
    config = transformers.LlamaConfig(use_cache=False, **sizes)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def _llama_3b() -> nn.Module:
    return _llama(
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        head_dim=128,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )


def _ladder(row: Row) -> Program:
    size, length = row.batch_size or 1, row.length or 0
    return Program(model=_llama_3b(), batch=_text(size, length), batch_size=size)


def _tutorial(row: Row) -> Program:
    model = _llama()  # Llama 2 7B is the config's default
    rank = int(row.method.rsplit("=", 1)[1])
    names = ALL_LINEAR if "all linear" in row.method else ("q_proj", "v_proj")
    adapters.freeze(model)
    adapters.wrap(model, names, lambda base: adapters.Lora(base, rank, torch.bfloat16))
    size = row.batch_size or 1
    return Program(
        model=model,
        batch=_text(size, 512),
        batch_size=size,
        micro_batches=2,
        recompute=True,
        assumed="512 tokens, every block recomputed",
    )


def _peft(row: Row) -> Program:
    model = _llama_3b()
    if row.method != "full":
        adapters.freeze(model)
        _adapt(model, row)
    size, length = row.batch_size or 1, row.length or 0
    batch = _text(size, length)
    batch["attention_mask"] = torch.ones(size, length, dtype=torch.int64)
    batch["attention_mask"][0, -1] = 0  # a shorter sample is padded
    return Program(
        model=model,
        batch=batch,
        batch_size=size,
        assumed=f"every batch has the longest length, {length} tokens",
    )


def _adapt(model: nn.Module, row: Row) -> None:
    if row.method.startswith("LORA"):
        rank = int(row.method.rsplit("=", 1)[1])
        names = ALL_LINEAR[4:] if "target-mlp" in row.label else ("q_proj", "v_proj")
        adapters.wrap(
            model, names, lambda base: adapters.Lora(base, rank, torch.float32)
        )
    elif row.method == "BEFT":
        adapters.wrap(model, ("v_proj",), adapters.TrainedBias)
    elif row.method == "IA3":
        adapters.wrap(
            model,
            ("k_proj", "v_proj", "down_proj"),
            lambda base: adapters.Scaled(base, before=base.in_features == 8192),
        )
    else:  # LN_TUNING
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)


def _bert(row: Row) -> Program:
    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",  # there was no other in 2022
    )
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config)
    size, length = row.batch_size or 1, row.length or 512
    return Program(
        model=model,
        batch={
            "input_ids": torch.zeros(size, length, dtype=torch.int64),
            "labels": torch.zeros(size, dtype=torch.int64),
        },
        batch_size=size,
        precision="fp16-mixed" if "fp16" in row.dtype else "fp32",
        optimizer="adafactor" if row.optimizer == "Adafactor" else one_by_one,
        # zero_grad() of that time kept gradients, as zeros, through the next forward.
        micro_batches=2,
        recompute=row.recomputed != "nothing",
    )


def one_by_one(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """transformers' AdamW of 2022 took one parameter after the other."""
    return torch.optim.AdamW(parameters, foreach=False, fused=False)


def _operator(row: Row) -> Program:
    words = row.model.split()
    if words[2] == "cross_entropy":
        tokens = int(words[3][1:]) * int(words[4][1:])
        model: nn.Module = Logits(tokens, int(words[5][1:]))
    else:
        tokens = int(words[5][2:])
        model = Head(tokens, int(words[3][1:]), int(words[4][1:]))
    return Program(
        model=model,
        batch={"target": torch.zeros(tokens, dtype=torch.int64)},
        batch_size=tokens,
        loss=lambda outputs, _: outputs,
        # Without momentum it keeps nothing; the benchmark has no optimizer at all.
        optimizer="sgd",
        micro_batches=2,  # gradients of the repetition before are there
    )


class Logits(nn.Module):
    """Logits that are given; their cross entropy."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(tokens, vocabulary, device="meta"))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits, target)


class Head(nn.Module):
    """Hidden states that are given, a projection to the vocabulary, cross entropy."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
        self.hidden = nn.Parameter(torch.empty(tokens, width, **options))
        self.head = nn.Linear(width, vocabulary, bias=False, **options)

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.hidden), target)


def _text(size: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(size, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


_GROUPS: dict[str, Callable[[Row], Program]] = {
    "LitGPT config hub": _litgpt,
    "torchtune ladder": _ladder,
    "torchtune tutorial": _tutorial,
    "peft MetaMathQA": _peft,
    "transformers docs": _bert,
    "Liger operators": _operator,
}
