"""Plans for several GPUs say what may differ from rank to rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetfit
from budgetfit import InputError, TraceError
from tests.example_batches.tiny_transformers import tiny_model

WIDTH = 16


class Routed(nn.Module):
    """The usual loop over experts; one without samples does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(0, 1)  # rows for all experts
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Masked(nn.Module):
    """Chooses rows by a mask, for all of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x[x.sum(-1) > 0]
        for layer in self.layers:
            rows = layer(rows)
        return rows


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.tensor(0))
        self.updates = True

    def forward(self, x: Tensor) -> Tensor:
        if self.updates:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        self.calls += 1
        return self.norm(self.linear(x))


def notes(model: nn.Module, engine: str, **given: Any) -> str:
    """The notes of an estimate for one GPU, or for two."""
    several: dict[str, Any] = {"gpus": 2, "engine": engine} if engine else {}
    recipe = budgetfit.Recipe(
        batch_size=8,
        precision="fp32",
        parallelism=budgetfit.Parallelism(**several) if several else None,
    )
    return "\n".join(budgetfit.estimate(model, recipe, gpu="t4", **given).notes)


def of_rows(model: nn.Module, engine: str) -> str:
    return notes(
        nn.Sequential(model),
        engine,
        batch=torch.ones(4, WIDTH),
        loss=lambda out, _: out.square().mean(),
    )


@pytest.mark.parametrize(
    ("engine", "then"), [("ddp", "ends in an error"), ("fsdp2", "do not match then")]
)
def test_experts_that_may_get_no_sample_must_run_on_all_ranks(
    engine: str, then: str
) -> None:
    said = of_rows(Routed(), engine)
    assert "which experts run in '0' may depend on a rank's samples" in said
    assert then in said
    assert "Use an empty input" in said


def test_a_plan_prints_it() -> None:
    plan = budgetfit.plan(
        Layers(),
        precision="fp32",
        gpu="t4",
        batch=torch.ones(4, 8, WIDTH),
        gpus=2,
        engine="ddp",
        batch_size=8,
        checkpointing="none",
    )
    text = " ".join(str(plan).split())
    assert "which experts run in 'layers.0' may depend on a rank's samples" in text


def test_a_plan_leaves_ddp_out_where_it_has_fewer_rows_than_experts() -> None:
    plan = budgetfit.plan(
        nn.Sequential(Routed()),
        vram="4GB",
        batch=torch.ones(4, WIDTH),
        loss=lambda out, _: out.square().mean(),
        gpus=2,
        batch_size=4,
        effective_batch_size=16,
    )
    assert plan.recipe.engine == "fsdp2"
    assert any("ddp is left out: The backward gave" in each for each in plan.warnings)


def test_masks_frozen_experts_and_one_gpu_need_no_warning() -> None:
    frozen = Routed()
    frozen.experts.requires_grad_(False)
    for model, engine in ((Routed(), ""), (Masked(), "ddp"), (frozen, "ddp")):
        assert "which experts run" not in of_rows(model, engine)


def test_experts_whose_weights_are_one_tensor_always_run() -> None:
    assert "which experts run" not in notes(tiny_model("MixtralForCausalLM"), "ddp")


@pytest.mark.parametrize(
    ("engine", "then"), [("ddp", "those of rank 0"), ("fsdp2", "each rank keeps")]
)
def test_buffers_that_the_forward_changes_differ_from_rank_to_rank(
    engine: str, then: str
) -> None:
    said = of_rows(Averages(), engine)
    assert "changes buffers (first '0.mean')" in said
    assert then in said


def test_norms_counters_and_spectral_norm_are_alike_on_all_ranks() -> None:
    model = Averages()
    model.updates = False
    assert "changes buffers" not in of_rows(model, "ddp")
    assert "changes buffers" not in of_rows(Averages(), "")


def test_batch_norms_are_converted_after_planning() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(Averages()))
    with pytest.raises(TraceError, match=r"batch norms, .* convert it before apply"):
        notes(model, "fsdp2", batch=torch.ones(4, WIDTH))


@pytest.mark.parametrize(
    ("engine", "then"), [("ddp", "its own samples"), ("fsdp2", "were before")]
)
def test_weights_that_the_forward_changes_are_refused(engine: str, then: str) -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH, max_norm=1.0))
    given = {"batch": torch.ones(4, 2).long(), "loss": lambda out, _: out.mean()}
    with pytest.raises(InputError, match=rf"Embedding changes its weight .*{then}"):
        notes(model, engine, **given)
    model.requires_grad_(requires_grad=False).append(nn.Linear(WIDTH, WIDTH))
    assert "its weight in place" not in notes(model, engine, **given)
