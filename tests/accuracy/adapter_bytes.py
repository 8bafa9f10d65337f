"""Predicted against real: parameters and stored bytes of LoRA and QLoRA models.

Run: ``python -m tests.accuracy.adapter_bytes`` (needs peft and bitsandbytes, no GPU).
The prediction is the model that is planned with, made on meta. The real one is loaded
with weights on the CPU, by ``from_pretrained(quantization_config=...)``, and adapted by
peft alone; what its quantised weights keep beside their parameters is counted.
"""

import tempfile
import warnings
from typing import Any, NamedTuple

import peft
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from budgetfit.core.adapter import Adapter, parse_adapter
from budgetfit.integrations.peft import adapted_meta_copy
from tests.quantized_bytes import stored_bytes

MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=192,
            intermediate_size=500,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=1000,
            tie_word_embeddings=False,
        ),
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=160, n_layer=3, n_head=4)),
    "bert": (
        BertForSequenceClassification,
        BertConfig(
            hidden_size=144,
            intermediate_size=300,
            num_hidden_layers=3,
            num_attention_heads=4,
        ),
    ),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(d_model=128, d_ff=250, num_layers=2, num_heads=4, d_kv=32),
    ),
}
# A head that is trained is not quantised; transformers' own choice misses this one.
SKIPPED = {"bert": ["classifier"]}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "lora r=3": {"method": "lora", "lora_r": 3},
    "qlora": {"method": "qlora"},
    "qlora, not prepared": {"method": "qlora", "prepare_for_kbit": False},
    "qlora, flat": {"method": "qlora", "double_quantization": False},
    "lora on int8": {"method": "lora", "quantization": "int8"},
}


class Sizes(NamedTuple):
    """What a model has: numbers that are trained, and bytes of everything."""

    trained: int
    parameters_bytes: int
    statistics_bytes: int


def predicted(model: nn.Module) -> Sizes:
    """Add up the planned model; statistics are its buffers beside the model's own."""
    own = ("absmax", "code", "offset", "SCB")
    statistics = sum(
        buffer.nbytes for name, buffer in model.named_buffers() if name.endswith(own)
    )
    return Sizes(*_parameters(model), statistics)


def real(model: nn.Module) -> Sizes:
    """Add up the real one."""
    kinds = ("Params4bit", "Int8Params")
    rows = [stored_bytes(p) for p in model.parameters() if type(p).__name__ in kinds]
    statistics = sum(sum(row.values()) - row["weight"] for row in rows)
    return Sizes(*_parameters(model), statistics)


def _parameters(model: nn.Module) -> tuple[int, int]:
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return trained, sum(p.untyped_storage().nbytes() for p in parameters)


def load(name: str, adapter: Adapter) -> nn.Module:
    """Load weights as a user does: saved, read back quantised, adapted by peft."""
    kind, config = MODELS[name]
    more: dict[str, Any] = {}
    if adapter.quantization is not None:
        four = adapter.quantization == "nf4"
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=four,
            load_in_8bit=not four,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=adapter.double_quantization,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=SKIPPED.get(name),
        )
    with tempfile.TemporaryDirectory() as folder:
        kind._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        model: nn.Module = kind.from_pretrained(
            folder, dtype=torch.bfloat16, device_map="cpu", **more
        )
    if adapter.prepared:
        model = peft.prepare_model_for_kbit_training(model)
    task = "SEQ_CLS" if name == "bert" else None
    lora = peft.LoraConfig(r=adapter.r, target_modules="all-linear", task_type=task)
    return peft.get_peft_model(model, lora)


def compare(name: str, adapter: Adapter) -> tuple[Sizes, Sizes]:
    """Return predicted and real sizes of one case."""
    kind, config = MODELS[name]
    with torch.device("meta"):
        planned = kind._from_config(config, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = load(name, adapter)
    return predicted(adapted_meta_copy(planned, adapter)[0]), real(live)


def main() -> None:
    """Print the table."""
    names = ("trained", "parameters_bytes", "statistics_bytes")
    heads = "".join(f"{name:>18}{'error':>9}" for name in names)
    print(f"{'model':8}{'adapters':22}{heads}")
    errors = []
    for model in MODELS:
        for label, asked in METHODS.items():
            adapter = parse_adapter(**asked)
            assert adapter is not None
            found, truth = compare(model, adapter)
            cells = []
            for have, want in zip(found, truth, strict=True):
                errors.append(have / want - 1 if want else float(have))
                cells.append(f"{want:>18,}{errors[-1]:>+9.2%}")
            print(f"{model:8}{label:22}" + "".join(cells))
    print(f"{len(errors)} figures, {sum(e != 0 for e in errors)} differ")


if __name__ == "__main__":
    main()
