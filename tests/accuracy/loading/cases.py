"""How models are loaded in the recordings: small, in several shards, in every way."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from budgetfit import Recipe

FILE = Path(__file__).with_name("recordings.json")
LENGTH, SAMPLES, STEPS = 512, 4, 3  # more tokens than bitsandbytes multiplies fused
SHARD = "60MB"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class LoadingCase:
    """A way to load.

    Attributes:
        asked: Arguments of ``estimate`` that say which adapters are trained.
        device_map: Whether ``from_pretrained`` loads onto the card. A quantised base
            always is.
        tied: Whether embeddings and head are one tensor.
        width, layers: Of the Llama that is loaded.
    """

    asked: dict[str, Any] = field(default_factory=dict)
    device_map: bool = False
    tied: bool = False
    width: int = 1024
    layers: int = 6

    @property
    def config(self) -> LlamaConfig:
        """The model: in fp32 where its weights are trained under autocast."""
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.width * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=16000,
            tie_word_embeddings=self.tied,
            dtype="bfloat16" if self.asked else "float32",
            use_cache=False,
            attn_implementation="eager",
            architectures=["LlamaForCausalLM"],
        )

    @property
    def recipe(self) -> Recipe:
        """What is trained after loading."""
        return Recipe(batch_size=SAMPLES, precision="bf16-mixed")


_LORA = {"method": "lora", "lora_r": 32, "target_modules": TARGETS}
_QLORA = {**_LORA, "method": "qlora"}
CASES = {
    "full, moved": LoadingCase(),
    "full, device_map": LoadingCase(device_map=True),
    "lora, moved": LoadingCase(asked=_LORA),
    "lora, device_map": LoadingCase(asked=_LORA, device_map=True),
    "qlora": LoadingCase(asked=_QLORA),
    "qlora, flat": LoadingCase(asked={**_QLORA, "double_quantization": False}),
    "qlora, tied": LoadingCase(asked=_QLORA, tied=True),
    "qlora, not prepared": LoadingCase(asked={**_QLORA, "prepare_for_kbit": False}),
    "qlora, wide": LoadingCase(asked=_QLORA, width=2048, layers=4),
    "qlora, narrow": LoadingCase(asked=_QLORA, width=384, layers=24),
    "qlora, all linear": LoadingCase(asked={"method": "qlora"}),
    "int8": LoadingCase(asked={**_LORA, "quantization": "int8"}),
    "int8, wide": LoadingCase(
        asked={**_LORA, "quantization": "int8"}, width=2048, layers=4
    ),
}
