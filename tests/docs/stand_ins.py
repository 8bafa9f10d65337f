"""What a page finds instead of a hub, a card and published configs: small, local ones.

A hub id gives a model of the same family with random weights, ``examples/configs`` are
the real ones with two narrow layers, ``.cuda()`` stays here, and nothing is reached
over the network.
"""

import copy
import json
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import budgetfit
from budgetfit.api import apply_and_verify
from budgetfit.api import plan as api
from budgetfit.verification import verify_plan
from tests.docs.markdown import ROOT

CONFIGS = ROOT / "examples" / "configs"
HUB = {
    "HuggingFaceTB/SmolLM2-360M": "SmolLM2-1.7B",
    "HuggingFaceTB/SmolLM2-1.7B": "SmolLM2-1.7B",
    "meta-llama/Llama-3.1-8B": "Llama-3.1-8B",
    "NousResearch/Meta-Llama-3.1-8B": "Llama-3.1-8B",
    "openai-community/gpt2": "gpt2",
}
FACTORY = """
from tests.docs.stand_ins import small_model, tokens


def build_model():
    return small_model("HuggingFaceTB/SmolLM2-360M")


def make_batch():
    return tokens(2, 16)


def loss(outputs, batch):
    return outputs.loss
"""
SHORT = 16  # tokens in a sample of the steps that are really run
SMALL: dict[str, Any] = {
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "max_position_embeddings": 2048,
        "rope_scaling": None,
        "torch_dtype": "float32",
    },
    "gpt2": {
        "n_layer": 4,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def small_fields(name: str) -> dict[str, Any]:
    """Return the config of a folder of examples/configs, two narrow layers deep."""
    fields = json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))
    return {**fields, **SMALL.get(fields["model_type"], {})}


def small_config(hub_id: str, **_: object) -> Any:
    """Stand for ``AutoConfig.from_pretrained``.

    Raises:
        OSError: No page names such a model; the network is not asked.
    """
    if hub_id not in HUB:
        raise OSError(f"{hub_id} has no stand-in in {__name__}.HUB")
    fields = small_fields(HUB[hub_id])
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


def full_config(hub_id: str, **_: object) -> Any:
    """Stand for ``AutoConfig.from_pretrained`` with the config as it is on the hub."""
    file = CONFIGS / HUB[hub_id] / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


def small_model(hub_id: str, quantization_config: object = None, **_: object) -> Any:
    """Stand for ``AutoModelForCausalLM.from_pretrained``."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config(hub_id))
    if quantization_config is None:
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(
            folder, quantization_config=quantization_config
        )


def write_files(folder: Path) -> None:
    """Write the files that pages name: examples, small configs, a factory."""
    (folder / "train.py").write_text(FACTORY)
    for file in sorted(CONFIGS.glob("*/config.json")):
        target = folder / "examples" / "configs" / file.parent.name / "config.json"
        target.parent.mkdir(parents=True)
        target.write_text(json.dumps(small_fields(file.parent.name)))
    for file in sorted((ROOT / "examples").glob("*.*")):
        shutil.copy(file, folder / "examples")
    shutil.copy(ROOT / "examples" / "oom.txt", folder)


def put_in_place(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Set up ``folder`` and this process for a page."""
    write_files(folder)
    patch.chdir(folder)
    patch.setattr(socket.socket, "connect", _no_network)
    patch.setattr(transformers.AutoConfig, "from_pretrained", small_config)
    patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", small_model)
    patch.setattr(torch.nn.Module, "cuda", lambda module: module)
    for home in (budgetfit, api):  # of pages and of the command line
        patch.setattr(home, "verify", _verify_here)
    # The batch is smaller than the plan's, so that this machine's memory is enough.
    patch.setattr(verify_plan, "free_bytes", lambda: None)


def tokens(samples: int, length: int) -> dict[str, torch.Tensor]:
    """Return a batch that every small language model here can train on."""
    ids = torch.arange(samples * length).reshape(samples, length) % 64
    return {"input_ids": ids, "labels": copy.copy(ids)}


def _verify_here(
    plan: Any, model: Any = None, *, device: str | None = None, **more: Any
) -> Any:
    """Check on the CPU, with one short sample, what a page checks on its card."""
    given = more.get("batch") is not None or more.get("fresh_process")
    if "input_ids" in plan.model.batch and not given:
        recipe = replace(plan.recipe, batch_size=1, gradient_accumulation_steps=1)
        plan = plan.changed(recipe=recipe)
        more["batch"] = tokens(1, SHORT)
    return apply_and_verify.verify(plan, model, device=device or "cpu", **more)


def _no_network(*_: object, **__: object) -> None:
    raise OSError("tests of pages do not use the network")
