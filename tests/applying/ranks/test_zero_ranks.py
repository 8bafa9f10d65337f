"""A plan for DeepSpeed's ZeRO, carried out by two processes with gloo."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import budgetfit
from budgetfit import InputError, Parallelism, Recipe, Segment
from budgetfit.core.parallelism import ZeroStage
from tests.applying.ranks.test_many_ranks import (
    RANKS,
    UPDATES,
    assert_same,
    batches,
    start,
)
from tests.applying.ranks.test_many_ranks import one_process as one_process_of
from tests.gloo_ranks import on_ranks
from tests.integrations.tiny_training import plan_for
from tests.zero_ranks import deepspeed_of_its_own


def zero(stage: ZeroStage) -> dict[str, Any]:
    return {"engine": "deepspeed", "zero_stage": stage}


RECOMPUTED = Recipe(
    batch_size=3,
    precision="fp32",
    optimizer="sgd",
    segments=tuple(Segment((f"transformer.h.{i}",)) for i in range(4)),
    parallelism=Parallelism(gpus=RANKS, **zero(3)),
)


def weights(run: budgetfit.Run) -> dict[str, torch.Tensor]:
    """The whole weights, which stage 3 gathers."""
    from deepspeed.utils import safe_get_full_fp32_param  # noqa: PLC0415

    return {
        name: safe_get_full_fp32_param(item).detach().clone()
        for name, item in run.model.named_parameters()
    }


def _train(stage: ZeroStage, treated: str) -> tuple[list[float], Any]:
    with deepspeed_of_its_own():
        run = start(zero(stage), treated)
        own = batches(2 * RANKS * UPDATES)[torch.distributed.get_rank() :: RANKS]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = [float(run.step(each, max_grad_norm=0.5)) for each in own]
        assert not [each for each in caught if "got no gradient" in str(each.message)]
        assert run.steps_done == UPDATES
        return losses, weights(run)


def _uneven(stage: ZeroStage) -> dict[str, torch.Tensor]:
    """One update of micro-batches of three samples and of one."""
    with deepspeed_of_its_own():
        run = start(zero(stage))
        rank = torch.distributed.get_rank()
        for number, each in enumerate(batches(2 * RANKS)[rank::RANKS]):
            size = 3 if number == rank else 1
            run.step({name: x[:size] for name, x in each.items()}, max_grad_norm=0.5)
        return weights(run)


def _refused(folder: str) -> dict[str, str]:
    said = {}
    with deepspeed_of_its_own():
        run = start(zero(2))
        batch = batches(1)[0]
        run.step(batch)
        for name, ask in (
            ("flush", run.flush),
            ("state", run.state_dict),
            ("load", lambda: run.load_state_dict({})),
        ):
            with pytest.raises(InputError) as refused:
                ask()
            said[name] = str(refused.value)
        run.step(batch)
        before = weights(run)
        run.engine.save_checkpoint(folder)
        run.step(batch)
        run.step(batch)
        run.engine.load_checkpoint(folder)
        assert all(torch.equal(before[name], x) for name, x in weights(run).items())
        with pytest.raises(IndexError):
            run.step({**batch, "input_ids": batch["input_ids"] + 1000})
        with pytest.raises(InputError) as refused:
            run.step(batch)
        said["after an error"] = str(refused.value)
        with pytest.warns(UserWarning, match="stays with DeepSpeed's engine"):
            run.undo()
    return said


class Block(torch.nn.MultiheadAttention):
    """It takes a weight from a layer that it does not call: ``out_proj``'s."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + super().forward(x, x, x, need_weights=False)[0]


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 16)
        blocks = torch.nn.ModuleList(Block(16, 2, batch_first=True) for _ in range(4))
        self.transformer: Any = torch.nn.ModuleDict({"h": blocks})

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(input_ids)
        for block in self.transformer["h"]:
            x = block(x)
        return (x - labels[..., None]).abs().mean()


def _attention_losses(
    segments: tuple[Segment, ...], parallelism: Parallelism | None
) -> list[float]:
    model = Attention()
    plan = plan_for(
        model,
        segments,
        optimizer="sgd",
        gradient_accumulation_steps=1,
        parallelism=parallelism,
    )
    run = budgetfit.apply(plan, model, learning_rate=0.1)
    return [float(run.step(batches(1)[0])) for _ in range(3)]


def _recomputed_attention() -> list[float]:
    with deepspeed_of_its_own():
        return _attention_losses(RECOMPUTED.segments, RECOMPUTED.parallelism)


def _all(folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {
        (stage, treated): _train(stage, treated)
        for stage, treated in ((1, "none"), (2, "mixed"), (3, "one"), (3, "host"))
    }
    found |= {stage: _uneven(stage) for stage in (1, 3)}
    found["attention"] = _recomputed_attention()
    found["refused"] = _refused(folder)
    return found


def _one_process_uneven() -> dict[str, torch.Tensor]:
    run = start(None)
    for number, each in enumerate(batches(2 * RANKS)):
        size = 3 if number // RANKS == number % RANKS else 1
        run.step({name: x[:size] for name, x in each.items()}, max_grad_norm=0.5)
    return {name: x.detach() for name, x in run.model.named_parameters()}


def test_ranks_of_zero_train_as_one_process_with_all_their_samples(
    tmp_path: Path,
) -> None:
    first, second = on_ranks(_all, RANKS, str(tmp_path))
    said = first.pop("refused")
    assert said == second.pop("refused")
    assert "1 of 2 have run" in said["flush"]
    assert "run.engine.save_checkpoint" in said["state"]
    assert "run.engine.load_checkpoint" in said["load"]
    assert "keeps gradients of it" in said["after an error"]
    kept = _attention_losses((), None)
    assert first.pop("attention") == pytest.approx(kept, rel=1e-5)
    second.pop("attention")
    uneven = _one_process_uneven()
    for stage in (1, 3):
        assert_same(([], first.pop(stage)), ([], uneven))
        second.pop(stage)
    expected = one_process_of("none")
    for case, found in first.items():
        assert_same(found, expected)
        assert_same(found, second[case])


def test_weights_that_a_block_takes_from_other_modules_are_traced_recomputed() -> None:
    batch = batches(1)[0]
    kept, recomputed = (
        budgetfit.estimate(Attention(), recipe, gpu="rtx-4090", batch=batch)
        for recipe in (replace(RECOMPUTED, segments=()), RECOMPUTED)
    )
    assert recomputed.step_ms > kept.step_ms


def test_what_does_not_run_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    zero2 = Parallelism(gpus=4, **zero(2))
    recipe = Recipe(batch_size=2, parallelism=zero2)

    def estimate(recipe: Recipe = recipe) -> None:
        batch = torch.zeros(2, 4)
        budgetfit.estimate(torch.nn.Linear(4, 4), recipe, gpu="t4", batch=batch)

    with pytest.raises(InputError, match="and adafactor trains a matrix by more"):
        estimate(replace(recipe, optimizer="adafactor"))
    with monkeypatch.context() as patched:
        patched.delattr("deepspeed.runtime.zero.stage3.defragment")
        with pytest.raises(InputError, match="This version of DeepSpeed cannot be"):
            estimate()
    monkeypatch.setattr("budgetfit.applying.zero.find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install deepspeed"):
        estimate()
