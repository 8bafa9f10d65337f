"""Small named models of many architectures, each with a batch of 2 samples.

Traces cost by the op and not by the byte, so depth is small and width does not matter.
``Mebi`` is the model for arithmetic by hand: all its tensors are whole MiB.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import ParamsT
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from budgetfit.applying.loss.call_model import mean_of_outputs
from budgetfit.core.plan import Plan

MIB = 1 << 20
SAMPLES = 2
VOCABULARY = 64
LENGTH = 16
CLASSES = 4
IMAGE = (3, 16, 16)
WIDTH = 32


def mean(outputs: torch.Tensor, _: object) -> torch.Tensor:
    """A loss for models that have none, which a plan without one assumes."""
    return mean_of_outputs(outputs)


def squares(outputs: torch.Tensor, _: object) -> torch.Tensor:
    """Another one."""
    return outputs.square().mean()


def sgd(parameters: ParamsT) -> torch.optim.Optimizer:
    """An optimizer as users hand one in."""
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: ParamsT) -> torch.optim.Optimizer:
    """One that keeps a state."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def seed(number: int) -> None:
    """Seed all global generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global one


def counting_hook(counts: dict[str, int], name: str) -> Callable[..., None]:
    """Return a hook that counts how often a module runs, recomputation included.

    A recomputation puts back what a hook leads to, but not what a cache of functools
    holds.
    """
    held = functools.cache(lambda: counts)

    def add(*_: object) -> None:
        held()[name] += 1

    return add


def still(model: nn.Module) -> nn.Module:
    """Without dropout, so that micro-batches draw nothing."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def alone(plan: Plan) -> Plan:
    """Return a plan with the alternatives that were judged to decide on it.

    Working out the others, as saving does, takes several times as long as the plan.
    """
    judged = plan.judged_alternatives
    return replace(plan, alternatives=judged, lazy_alternatives=None)


def without_loss() -> None:
    """Let a trace go on where a model has no loss."""


class Chain(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Mebi(Chain):
    """Residual blocks of one [512, 512] fp32 weight; a sample is as large: 1 MiB."""

    class Block(nn.Module):
        """x + tanh(x W): saves x and the tanh, 2 MiB a sample."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(512, 512, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.inner(x))

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(*(Mebi.Block() for _ in range(blocks)))


def gpt2_config(**config: Any) -> GPT2Config:
    """Dropout 0.1 everywhere, tied embeddings, a generation cache that is on."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 2 * LENGTH, "n_embd": WIDTH}
    words = {"n_layer": 3, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    made = {"architectures": ["GPT2LMHeadModel"]}
    return GPT2Config(**{**sizes, **words, **made, **config})


def gpt2(**config: Any) -> nn.Module:
    return GPT2LMHeadModel(gpt2_config(**config))


SIZES = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 3}
LLAMA = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 2,
    "max_position_embeddings": 2 * LENGTH,
}


def llama(**config: Any) -> nn.Module:
    """Keys and values have half as many heads as queries."""
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **config}))


def mixtral() -> nn.Module:
    """Tokens are sorted by expert: grouped matrix products, routing by value."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(
        MixtralConfig(**{**LLAMA, **experts, "num_hidden_layers": 2})
    )


def bert(**config: Any) -> nn.Module:
    """Its blocks end in a layer norm, so autocast hands fp32 from block to block."""
    return BertForMaskedLM(BertConfig(**{**BERT, **config}))


def bert_classifier(**config: Any) -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(**{**BERT, "num_labels": CLASSES, **config})
    )


def t5(**config: Any) -> nn.Module:
    """Two chains; a position bias that the first block of each makes for all."""
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH}
    layers = {"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    # With a cache, keys are laid out differently, and products round differently.
    return T5ForConditionalGeneration(
        T5Config(**{**sizes, **layers, "use_cache": False, **config})
    )


def vit(**config: Any) -> nn.Module:
    image = {"image_size": IMAGE[1], "patch_size": 4, "num_labels": CLASSES}
    rest = {"num_attention_heads": 2, "hidden_dropout_prob": 0.1}
    return ViTForImageClassification(ViTConfig(**{**SIZES, **image, **rest, **config}))


def convolutions() -> nn.Module:
    """Sequential in Sequential, with the buffers of batch norm."""

    def block(channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        )

    return nn.Sequential(
        block(IMAGE[0]),
        block(8),
        block(8),
        nn.Flatten(),
        nn.Linear(8 * IMAGE[1] * IMAGE[2], CLASSES),
    )


class TorchTransformer(nn.Module):
    """torch's own encoder and decoder; returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        return self.head(self.transformer(src, tgt))


class Example(NamedTuple):
    """A model's factory and what it is called with."""

    make: Callable[[], nn.Module]
    batch: Any

    def model(self) -> nn.Module:
        """Return the model in training mode, always with the same weights."""
        torch.manual_seed(0)
        return self.make().train()


def text(samples: int = SAMPLES, length: int = LENGTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (samples, length)
    ids = torch.randint(1, VOCABULARY, shape, generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def images(samples: int = SAMPLES) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": _floats(samples, *IMAGE),
        "labels": torch.arange(samples) % CLASSES,
    }


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


EXAMPLES: dict[str, Example] = {
    "mebi": Example(Mebi, torch.zeros(SAMPLES, 512, 512)),
    "gpt2": Example(gpt2, text()),
    "llama": Example(llama, text()),
    "mixtral": Example(mixtral, text()),
    "bert": Example(bert, text()),
    "t5": Example(t5, text()),
    "vit": Example(vit, images()),
    "convolutions": Example(convolutions, _floats(SAMPLES, *IMAGE)),
    "transformer": Example(
        TorchTransformer,
        {"src": _floats(SAMPLES, 8, WIDTH), "tgt": _floats(SAMPLES, 6, WIDTH)},
    ),
}
# Those that have none of their own.
WITHOUT_LOSS = frozenset({"mebi", "convolutions", "transformer"})
