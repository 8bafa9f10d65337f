"""Exports of a plan for several GPUs, trained by two processes with gloo."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import budgetfit
from budgetfit import Parallelism
from tests.gloo_ranks import on_ranks
from tests.integrations.tiny_training import plan_for, tiny_model

RANKS, STEPS = 2, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", "gradient_as_bucket_view": True},
    "fsdp2": {"engine": "fsdp2"},
    "hsdp": {"engine": "fsdp2", "shard": 1, "sync_each_batch": True},
}


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        ids = torch.randint(64, (3, 8), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


def plan_of(name: str | None, **recipe: Any) -> budgetfit.Plan:
    """Two blocks recomputed, in two micro-batches of each rank or four of one."""
    several = Parallelism(gpus=RANKS, **SETTINGS[name]) if name else None
    recipe = {"gradient_accumulation_steps": 2 if name else 2 * RANKS, **recipe}
    return plan_for(tiny_model("llama"), parallelism=several, **recipe)


def one_process() -> list[float]:
    """Losses of updates of one process with the samples of all."""
    run = budgetfit.apply(plan_of(None), tiny_model("llama"), learning_rate=1e-2)
    data = samples(2 * RANKS * STEPS)
    losses = [float(run.step(each, max_grad_norm=0.5)) for each in data]
    return torch.tensor(losses).view(STEPS, -1).mean(1).tolist()


def _scripts(folder: str) -> dict[str, list[float]]:
    found = {}
    rank = int(os.environ["RANK"])
    for number, name in enumerate(SETTINGS):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
        script: dict[str, Any] = {"__name__": name}
        exec(plan_of(name).to_torch_script(), script)  # noqa: S102 - our own
        script["build_model"] = lambda: tiny_model("llama")
        words = ["--lr", "1e-2", "--max-grad-norm", "0.5", "--device", "cpu"]
        own = samples(2 * RANKS * STEPS)[rank::RANKS]
        script["batches"] = lambda _, own=own: iter(own)
        place = f"{folder}/{name}"
        found[name] = script["main"]([*words, "--steps", "1", "--save", place])
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        script["batches"] = lambda _, own=own: iter(own[2:])
        found[name] += script["main"]([*words, "--steps", "1", "--resume", place])
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return found


def test_scripts_of_torch_alone_train_save_and_resume(tmp_path: Path) -> None:
    expected = one_process()
    for found in on_ranks(_scripts, RANKS, str(tmp_path)):
        for name, losses in found.items():
            assert losses == pytest.approx(expected, abs=1e-6), name
    text = plan_of("fsdp2").to_torch_script()
    assert "Start it with: torchrun --nproc-per-node 2 THIS_FILE" in text
    policy = {"engine": "fsdp2", "param_dtype": "bf16", "reduce_dtype": "fp32"}
    SETTINGS["policy"] = policy
    try:
        text = plan_of("policy", precision="bf16-mixed").to_torch_script()
    finally:
        del SETTINGS["policy"]
    assert "param_dtype=torch.bfloat16, reduce_dtype=torch.float32" in text
    assert "autocast" not in text
