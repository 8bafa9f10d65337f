"""Small bases and adapters that several tests of LoRA share."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from budgetfit.core.adapter import Adapter, parse_adapter

# peft 0.21 asks transformers 5 by a name that has since changed.
QUIET = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

CONFIG: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "use_cache": False,
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
}


def config() -> LlamaConfig:
    return LlamaConfig(**CONFIG)


def base(device: str = "cpu") -> LlamaForCausalLM:
    with torch.device(device):
        return LlamaForCausalLM._from_config(config(), dtype=torch.bfloat16)


def adapter(method: str = "lora", **more: Any) -> Adapter:
    found = parse_adapter(method, **more)
    assert found is not None
    return found


def batch(samples: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.arange(samples * length).reshape(samples, length) % CONFIG["vocab_size"]
    return {"input_ids": ids, "labels": ids}


def trained(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}


def stored(model: nn.Module) -> dict[str, tuple[str, int]]:
    return {n: (str(p.dtype), p.nbytes) for n, p in model.named_parameters()}
