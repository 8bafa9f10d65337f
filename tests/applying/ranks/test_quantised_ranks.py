"""LoRA on a quantised base, trained by two processes with gloo under DDP."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import budgetfit
from budgetfit import InputError, Parallelism, Recipe
from budgetfit.applying.quantized_layers.stored_weights import quantized_tensors
from budgetfit.core.verification import Verification
from budgetfit.integrations.exports import trainer as trainer_export
from budgetfit.integrations.quantization.quantize_linear import quantize
from tests.gloo_ranks import on_ranks
from tests.integrations.adapters import QUIET, base, batch, config
from tests.models import alone

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytestmark = QUIET

RANKS, UPDATES, SAMPLES = 2, 2, 2
EQUAL = 1e-6
BASES: dict[str, dict[str, Any]] = {
    "nf4": {"method": "qlora"},
    "int8": {"method": "lora", "quantization": "int8"},
}


def quantised(plan: budgetfit.Plan) -> torch.nn.Module:
    """A base with the same weights in each process."""
    torch.manual_seed(0)
    model = base().float()
    assert plan.adapter is not None
    quantize(model, plan.adapter, "cpu")
    return model


def plan_for(name: str, gpus: int) -> budgetfit.Plan:
    torch.manual_seed(0)
    plan = budgetfit.plan(
        base().float(),
        gpu="rtx-4090",
        gpus=gpus,
        batch=batch(SAMPLES),
        batch_size=SAMPLES,
        effective_batch_size=2 * SAMPLES * RANKS,
        optimizer="sgd",
        precision="fp32",
        checkpointing="full",
        **BASES[name],
    )
    return alone(plan)


def train(plan: budgetfit.Plan, numbers: range) -> tuple[list[float], dict[str, Any]]:
    """Losses of micro-batches, and the adapters after them."""
    model = quantised(plan)
    torch.manual_seed(numbers.start)  # peft draws other matrices on each rank
    run = budgetfit.apply(plan, model, learning_rate=0.5)
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(128, (SAMPLES, 16), generator=generator)
        losses.append(float(run.step({"input_ids": ids, "labels": ids})))
    assert run.steps_done == UPDATES
    return losses, {
        name: each.detach().clone()
        for name, each in run.model.named_parameters()
        if each.requires_grad
    }


def _rank(path: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    plan = budgetfit.Plan.load(path)
    own = range(int(os.environ["RANK"]), 2 * RANKS * UPDATES, RANKS)
    found: dict[str, Any] = {"trained": train(plan, own)}

    other = quantised(plan)
    if own.start:
        _, scales = list(quantized_tensors(other))[1]
        scales.add_(1)
    with pytest.raises(InputError, match="Rank 1 has other weights than rank 0") as why:
        budgetfit.apply(plan, other)
    assert "without the scales" in str(why.value)

    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    check = budgetfit.verify(plan, quantised(plan), batch=batch(SAMPLES), device="cpu")
    return {**found, "verified": check}


@pytest.mark.parametrize("name", BASES)
def test_two_ranks_train_the_adapters_of_one_process(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = plan_for(name, RANKS)
    assert plan.recipe.parallelism is not None
    assert plan.recipe.parallelism.engine == "ddp"  # of auto's engines
    plan.save(path)
    first, second = on_ranks(_rank, RANKS, str(path))

    losses, adapters = train(plan_for(name, 1), range(2 * RANKS * UPDATES))
    means = torch.tensor(losses).view(-1, RANKS).mean(1).tolist()
    assert first["trained"][0] == pytest.approx(means, abs=EQUAL)
    for key, value in adapters.items():
        assert (first["trained"][1][key] - value).abs().max() <= EQUAL, key
        assert torch.equal(first["trained"][1][key], second["trained"][1][key]), key

    check = first["verified"]
    assert isinstance(check, Verification)
    assert check.passed
    assert check.gradients_match
    assert check.max_gradient_error <= EQUAL
    assert any("bitsandbytes computes quantised" in each for each in check.notes)


def test_engines_that_shard_refuse_a_quantised_base() -> None:
    asked: dict[str, Any] = {"gpu": "rtx-4090", "batch": batch(), **BASES["nf4"]}
    for engine in ("fsdp2", "zero2"):
        with pytest.raises(InputError, match=r"DDP alone.*engine=\"ddp\""):
            budgetfit.plan(config(), gpus=2, engine=engine, **asked)
    recipe = Recipe(batch_size=2, parallelism=Parallelism(engine="fsdp2", gpus=2))
    with pytest.raises(InputError, match="packed weights and not their scales"):
        budgetfit.estimate(config(), recipe, **asked)


def test_more_gpus_do_not_help_a_base_that_each_holds() -> None:
    asked: dict[str, Any] = {"vram": "2304MiB", "gpu": "rtx-4090", **BASES["nf4"]}
    long = batch(2, 256)
    with pytest.raises(budgetfit.DoesNotFitError, match="each holds the quantised"):
        budgetfit.plan(config(), batch=long, batch_size=8192, gpus="auto", **asked)


def _export(script: str, folder: str) -> list[float]:
    warnings.simplefilter("ignore")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    exported: dict[str, Any] = {"__name__": "exported"}
    exec(script, exported)
    exported["MODEL"] = folder
    model = exported["load_model"]()
    ids = torch.arange(16)
    rows = [{"input_ids": ids, "labels": ids}] * 64
    trainer = exported["make_trainer"](model, rows)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    assert {type(each).__name__ for each in model.parameters()} >= {"Params4bit"}
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_the_trainers_script_loads_each_rank_on_its_own_device(tmp_path: Path) -> None:
    plan, path = plan_for("nf4", RANKS), tmp_path / "plan.json"
    plan.save(path)
    base().float().save_pretrained(tmp_path / "base")
    script = trainer_export.export_text(plan, str(path))
    assert 'device_map={"": PartialState().device}' in script
    here = (
        f'output_dir="{tmp_path}", use_cpu=True, report_to=[], save_strategy="no", '
        "disable_tqdm=True, max_steps=2, logging_steps=1,"
    )
    script = script.replace('output_dir="out",', here)
    script = script.replace("optim=", 'lr_scheduler_type="constant", optim=', 1)
    script = script.replace("REPLACE by the hub id", str(tmp_path / "base"))
    first, second = on_ranks(_export, RANKS, script, str(tmp_path / "base"))
    assert first == second
    assert first[1] < first[0]
