"""Load models from safetensors onto the card, train, and record what was allocated.

Run as the program of ``tests.accuracy.nulldriver.run``, with peft and bitsandbytes on
its path; it writes ``recordings.json``.
"""

import contextlib
import gc
import json
import sys
import tempfile
import warnings
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from budgetfit.applying.run.run import Run
from tests.accuracy.loading.cases import (
    CASES,
    FILE,
    LENGTH,
    SAMPLES,
    SHARD,
    STEPS,
    LoadingCase,
)


def load(case: LoadingCase, folder: str) -> nn.Module:
    """Load as the exports' ``load_model`` does, and move what is on the host."""
    asked = case.asked
    given: dict[str, Any] = {"attn_implementation": "eager"}
    if case.device_map:
        given["device_map"] = {"": 0}
    stored = asked.get("quantization", "nf4" if asked.get("method") == "qlora" else "")
    if stored == "nf4":
        given["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=asked.get("double_quantization", True),
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    elif stored:
        given["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **given)
    if stored and asked.get("prepare_for_kbit", True):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if asked:
        rank = asked.get("lora_r", 16)
        targets = asked.get("target_modules", "all-linear")
        config = LoraConfig(
            r=rank,
            lora_alpha=32,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, config)
    moved: nn.Module = model.to("cuda")
    return moved


def save(case: LoadingCase, folder: str) -> None:
    """Save a checkpoint in several shards, and forget what that took."""
    made = AutoModelForCausalLM.from_config(case.config)
    made.save_pretrained(folder, max_shard_size=SHARD)
    del made
    _forget()


def record(case: LoadingCase) -> dict[str, int]:
    """Return what is allocated and reserved after loading and over some steps."""
    with tempfile.TemporaryDirectory() as folder:
        save(case, folder)
        model = load(case, folder)
    loaded = {
        "loaded_allocated_bytes": torch.cuda.memory_allocated(),
        "loaded_reserved_bytes": torch.cuda.memory_reserved(),
        "loading_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    run = Run(model, case.recipe)
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    for _ in range(STEPS):
        run.step({"input_ids": ids.cuda(), "labels": ids.cuda()})
    return {
        **loaded,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _forget() -> None:
    """Leave the card as it is when a program starts."""
    with contextlib.suppress(ImportError):
        import bitsandbytes

        bitsandbytes.functional.name2qmap.clear()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Record every case, or those named; print and write the figures."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.backends.cudnn.enabled = False
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in sys.argv[1:] or CASES:
        rows[name] = record(CASES[name])
        print(name, rows[name], flush=True)
        FILE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
