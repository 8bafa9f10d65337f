"""A plan says where accumulated gradients are not those of one large batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgetfit
from tests.example_batches.tiny_transformers import tiny_model

pytestmark = pytest.mark.usefixtures("kept_traces")
WIDTH = 16


class Tower(nn.Module):
    def __init__(self, *, norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = norm(WIDTH) if norm is not nn.Identity else norm()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.norm(x)


def info_nce(outputs: Tensor, batch: Tensor) -> Tensor:
    scores = nn.functional.normalize(outputs) @ nn.functional.normalize(batch).T / 0.07
    return nn.functional.cross_entropy(
        scores, torch.arange(len(scores), device=scores.device)
    )


def two_views(outputs: Tensor, _batch: Tensor) -> Tensor:
    both = nn.functional.normalize(torch.cat([outputs, outputs.flip(-1)]))
    labels = torch.arange(len(both), device=both.device)
    return nn.functional.cross_entropy(both @ both.T, labels.roll(len(outputs)))


def mean_square(outputs: Tensor, _batch: Tensor) -> Tensor:
    return outputs.square().mean()


def said(model: nn.Module, *, steps: int = 4, **given: Any) -> str:
    plan = budgetfit.plan(
        model, vram="3GB", batch_size=8, effective_batch_size=8 * steps, **given
    )
    return " ".join(str(plan).split())


COMPARES = (
    "the loss compares the samples of a batch: with gradient_accumulation_steps=4 each "
    "micro-batch of 8 compares only its own. Use batch_size=32 to compare "
    "all 32"
)


@pytest.mark.parametrize("loss", [info_nce, two_views])
def test_a_contrastive_loss_is_found_by_its_scores_of_pairs(loss: object) -> None:
    batch = torch.ones(4, WIDTH)
    assert COMPARES in said(Tower(), batch=batch, loss=loss)
    assert COMPARES not in said(Tower(), batch=batch, loss=loss, steps=1)


def test_clip_compares_images_with_texts() -> None:
    assert COMPARES in said(tiny_model("CLIPModel"))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "ViTForImageClassification"])
def test_attention_compares_no_samples(name: str) -> None:
    assert "compares" not in said(tiny_model(name))


def test_batch_norms_that_train_see_a_micro_batch_alone() -> None:
    batch = torch.ones(4, WIDTH)
    words = "batch norms take the statistics of each micro-batch of 8"
    model = Tower(norm=nn.BatchNorm1d)
    assert words in said(model, batch=batch, loss=mean_square)
    assert "compares" not in said(model, batch=batch, loss=mean_square)
    assert words not in said(Tower(), batch=batch, loss=mean_square)
    model.norm.eval()
    assert words not in said(model, batch=batch, loss=mean_square)


def test_each_rank_has_samples_of_its_own() -> None:
    batch = torch.ones(4, WIDTH)
    for steps, words in ((1, ""), (2, "with gradient_accumulation_steps=2 ")):
        text = said(
            Tower(norm=nn.BatchNorm1d),
            steps=2 * steps,
            batch=batch,
            loss=info_nce,
            gpus=2,
            engine="ddp",
        )
        each = "each micro-batch of 8 on each of 2 ranks"
        assert f"{words}{each} compares only its own. Gather what it" in text
        assert f"statistics of {each}, not of all {16 * steps} samples" in text
