import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import budgetfit
from budgetfit.errors import InputError
from budgetfit.integrations.exports import axolotl
from budgetfit.integrations.model_sources.model_source import resolve_model
from budgetfit.integrations.quantization.unquantized_modules import size_notes
from budgetfit.integrations.source_code.model_loading import load_model_text
from tests.integrations.adapters import QUIET, adapter
from tests.models import alone
from tests.quantized_bytes import stored_bytes

pytestmark = QUIET

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
BITS = {"nf4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True}}


def llama(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    config = LlamaConfig(**SIZES, tie_word_embeddings=False)
    return LlamaForCausalLM._from_config(config, dtype=dtype)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Save a Llama as a checkpoint says that it is stored; return its folder."""

    def save(dtype: str | None = "bfloat16", **more: Any) -> str:
        fields = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).to_dict()
        fields = {**fields, "dtype": dtype, **more}
        if dtype is None:
            del fields["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return str(tmp_path)

    return save


def stored(model: nn.Module) -> dict[str, tuple[torch.dtype, int]]:
    return {name: (p.dtype, p.nbytes) for name, p in model.named_parameters()}


def in_fp8(folder: Path) -> None:
    """Write a Llama as fine-grained fp8 checkpoints are written."""
    tensors = {}
    for name, tensor in llama().state_dict().items():
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        tensors[name] = tensor.to(torch.float8_e4m3fn)
        blocks = [-(-size // 32) for size in tensor.shape]
        tensors[f"{name}_scale_inv"] = torch.ones(blocks)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = LlamaConfig(
        **SIZES, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]
    ).to_dict()
    fields["dtype"] = "bfloat16"
    fields["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
    }
    (folder / "config.json").write_text(json.dumps(fields))


def in_mxfp4(folder: Path) -> None:
    """Write a GPT-OSS as its makers do: no dtype, experts in blocks of 32."""
    config = GptOssConfig(
        **SIZES,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
    )
    model = GptOssForCausalLM._from_config(config, dtype=torch.bfloat16)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.zeros((*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(shape, 127, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = {**config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    del fields["dtype"]
    fields["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("save", "kind", "loader"),
    [
        (in_fp8, LlamaForCausalLM, FineGrainedFP8Config),
        (in_mxfp4, GptOssForCausalLM, Mxfp4Config),
    ],
)
def test_what_is_dequantised_is_planned_as_from_pretrained_loads_it(
    tmp_path: Path, save: Callable[[Path], None], kind: Any, loader: Any
) -> None:
    save(tmp_path)
    planned = resolve_model(str(tmp_path))
    loaded = kind.from_pretrained(tmp_path, quantization_config=loader(dequantize=True))
    assert stored(planned.model) == stored(loaded)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    (note,) = planned.notes
    assert "planned dequantised to bf16" in note
    assert f"{loader.__name__}(dequantize=True)" in note
    assert not hasattr(planned.model.config, "quantization_config")
    # What it loads as is a model like any other, and is planned again.
    assert stored(resolve_model(loaded).model) == stored(loaded)


def test_programs_load_dequantised_what_was_planned_so(tmp_path: Path) -> None:
    in_mxfp4(tmp_path)
    plan = budgetfit.plan(
        str(tmp_path),
        gpu="h100-80gb",
        max_length=16,
        batch_size=1,
        checkpointing="none",
        precision="bf16",
    )
    alone(plan).save(tmp_path / "plan.json")
    plan = budgetfit.Plan.load(tmp_path / "plan.json")
    loading = load_model_text(plan)
    assert "quantization_config=Mxfp4Config(dequantize=True)" in loading.code
    assert ("transformers", "Mxfp4Config") in loading.names
    assert "transformers.Mxfp4Config(dequantize=True)" in plan.to_torch_script()
    text = axolotl.export_text(plan, "plan.json")
    assert 'model_quantization_config: "Mxfp4Config"\n' in text
    assert 'model_quantization_config_kwargs: {"dequantize": true}\n' in text
    older = replace(plan, model=replace(plan.model, dequantizer=""))
    assert "Mxfp4Config" not in load_model_text(older).code


@pytest.mark.parametrize(
    ("kind", "nested"), [("nf4", True), ("nf4", False), ("int8", False)]
)
def test_what_bitsandbytes_stored_is_planned_as_from_pretrained_loads_it(
    tmp_path: Path, kind: str, nested: bool
) -> None:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path / "plain")
    how = BitsAndBytesConfig(
        **BITS[kind],
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "down_proj"],
    )
    quantised = LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=how, device_map="cpu"
    )
    folder = tmp_path / "stored"
    quantised.save_pretrained(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder, device_map="cpu")
    planned = resolve_model(str(folder)).model
    assert stored(planned) == stored(loaded)
    layers = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    kinds = [type(planned.get_submodule(name)).__name__ for name in layers]
    assert kinds == ["Linear4bit" if kind == "nf4" else "Linear8bitLt", "Linear"]
    up = planned.get_submodule(layers[0]), loaded.get_submodule(layers[0])
    assert stored_bytes(up[0].weight) == stored_bytes(up[1].weight)
    # A plan from the config is the plan of the model that it describes.
    settings = {"gpu": "rtx-4090", "max_length": 16, "method": "lora", "batch_size": 2}
    plans = [
        budgetfit.plan(model, checkpointing="none", **settings)
        for model in (str(folder), loaded)
    ]
    assert plans[0].estimate.reserved_bytes == plans[1].estimate.reserved_bytes
    for plan in plans:
        assert plan.adapter is not None
        assert plan.adapter.quantization == kind
        assert plan.adapter.double_quantization == (nested or kind == "int8")


def test_qlora_on_what_is_quantised_already_takes_the_stored_layers(
    write: Callable[..., str],
) -> None:
    pytest.importorskip("bitsandbytes")
    folder = write(quantization_config={"load_in_8bit": True})
    settings: dict[str, Any] = {
        "gpu": "rtx-4090",
        "max_length": 16,
        "batch_size": 2,
        "checkpointing": "none",
    }
    plan = budgetfit.plan(folder, method="qlora", **settings)
    assert plan.adapter is not None
    assert (plan.adapter.quantization, plan.adapter.prepared) == ("int8", True)
    note = "the base is stored in int8 and stays so: nf4 is not used"
    assert note in plan.warnings
    assert "base in int8" in plan.model.source
    # Its own words: no surprise for who asked for what is stored.
    again = budgetfit.plan(folder, method="lora", quantization="int8", **settings)
    assert note not in again.warnings
    assert again.estimate.reserved_bytes == plan.estimate.reserved_bytes
    # Verifying it builds the same layers with random weights.
    assert budgetfit.verify(plan, device="cpu", steps=3).passed


@pytest.mark.parametrize(
    ("fields", "more", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, {}, "quantised by gptq.*model card"),
        ({"quant_method": "awq"}, {"method": "lora"}, "quantised by awq"),
        ({"bits": 4}, {}, "quantised by a method without a name"),
        ({"load_in_4bit": True}, {}, 'by bitsandbytes.*method="lora"'),
        ({"quant_method": "fp8"}, {"method": "qlora"}, "stored in fp8.*unquantised"),
        (
            {"load_in_8bit": True, "llm_int8_has_fp16_weight": True},
            {"method": "lora"},
            "has_fp16_weights=True cannot be planned",
        ),
        ({"load_in_4bit": "yes"}, {}, "quantization_config of .* cannot be read"),
    ],
)
def test_what_cannot_be_trained_so_is_refused_in_a_line_that_helps(
    write: Callable[..., str], fields: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    folder = write(quantization_config=fields)
    with pytest.raises(InputError, match=says) as error:
        budgetfit.estimate(folder, gpu="t4", max_length=16, **more)
    assert "\n" not in str(error.value)


def test_a_loaded_model_of_another_method_is_refused() -> None:
    model = llama()
    vars(model)["quantization_method"] = "torchao"
    with pytest.raises(InputError, match=r"quantised by torchao.*dequantise it"):
        budgetfit.estimate(model, gpu="t4", max_length=16)


def test_a_method_that_transformers_does_not_know_is_ignored_with_a_note(
    write: Callable[..., str],
) -> None:
    resolved = resolve_model(write(quantization_config={"quant_method": "own"}))
    assert "does not know the quantisation 'own'" in resolved.notes[0]
    assert {p.dtype for p in resolved.model.parameters()} == {torch.bfloat16}


def test_a_config_without_dtype_has_that_of_the_weights_beside_it(
    write: Callable[..., str], tmp_path: Path
) -> None:
    folder = write(None)
    alone = resolve_model(folder)
    assert {p.dtype for p in alone.model.parameters()} == {torch.float32}
    assert "planned in fp32, but from_pretrained loads" in alone.dtype_notes[0]
    model = llama(torch.float16)
    model.save_pretrained(tmp_path)
    for size in ("1GB", "20KB"):  # one file of weights, and several with an index
        model.save_pretrained(tmp_path, max_shard_size=size)
        beside = resolve_model(write(None))
        assert {p.dtype for p in beside.model.parameters()} == {torch.float16}
        assert beside.dtype_notes == (
            "the config names no dtype: planned in fp16, as the weights beside it",
        )
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float16}


def test_the_assumed_dtype_is_said_where_it_matters(write: Callable[..., str]) -> None:
    folder = write(None)

    def said(**settings: Any) -> bool:
        made = budgetfit.plan(
            folder,
            gpu="rtx-4090",
            max_length=16,
            batch_size=2,
            checkpointing="none",
            **settings,
        )
        return any("names no dtype" in warning for warning in made.warnings)

    assert said(method="lora")
    assert said(precision="as-is")
    assert not said()  # all weights are trained in fp32


def test_experts_that_stay_unquantised_are_named_with_their_size() -> None:
    """What made 114 GiB of a model with 30 B parameters in 4 bits."""
    config = Qwen3MoeConfig(
        **SIZES,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    experts, copies = size_notes(model, prepared=True)
    # 2 layers x 4 experts x 3 matrices of 64 x 32, two bytes each.
    assert experts == (
        "not quantised: 96 KiB in 2 Qwen3MoeExperts (such as "
        "model.layers.0.mlp.experts), which hold their weights themselves: "
        "bitsandbytes quantises linear layers only"
    )
    assert copies.startswith("fp32 copies of ")
    assert "Qwen3MoeExperts" in copies
    assert size_notes(model, prepared=False) == (experts,)
    planned = budgetfit.estimate(
        model,
        budgetfit.Recipe(batch_size=2, precision="bf16-mixed"),
        gpu="rtx-4090",
        max_length=16,
        method="qlora",
    )
    assert experts in planned.notes


def test_a_plain_models_base_has_nothing_to_say_of_experts() -> None:
    (copies,) = size_notes(llama(), prepared=True)
    assert "embeddings" in copies
    assert "head" in copies
    assert adapter("qlora").prepared
