"""objective="length": the longest samples that fit, on a model of two small blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch

import budgetfit
from budgetfit.api.compare import compare
from budgetfit.core.plan import Plan
from budgetfit.planning.alternatives.longest_length import candidate_lengths
from tests import models
from tests.models import alone

pytestmark = pytest.mark.usefixtures("kept_traces")
POSITIONS = 65_536


def llama() -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    words = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
    return models.llama(**sizes, **words, max_position_embeddings=POSITIONS)


def own_loss(outputs: Any, _: Any) -> torch.Tensor:
    """The model's own loss, which is then not cut into parts."""
    loss: torch.Tensor = outputs.loss
    return loss


ASKED: dict[str, Any] = {
    "gpu": "rtx-4090",
    "vram": "700MiB",
    "headroom": 0,
    "precision": "fp32",
    "loss": own_loss,
    "checkpointing": "full",  # one recipe a length
}
ESTIMATED = {"gpu", "vram", "headroom", "loss"}  # the rest is in the recipe


def test_the_longest_context_is_found_with_few_traces(tmp_path: Path) -> None:
    said: list[str] = []
    plan = budgetfit.plan(llama(), objective="length", progress=said.append, **ASKED)
    length = plan.longest_length
    lengths = candidate_lengths(POSITIONS)
    assert length is not None
    assert 1024 < length < POSITIONS
    assert length % 128 == 0
    assert plan.fits
    assert plan.recipe.batch_size == 1
    assert plan.model.batch["input_ids"][0][1] == length
    assert f"longest context that fits: {length:,} tokens" in str(plan)
    tried = [text for text in said if "looking for the longest" in text]
    assert len(tried) <= 8
    # It is the plan for that length, and the next one has none.
    same = budgetfit.plan(llama(), max_length=length, batch_size=1, **ASKED)
    assert same.recipe == plan.recipe
    assert same.estimate == plan.estimate
    following = lengths[lengths.index(length) + 1]
    asked = {name: value for name, value in ASKED.items() if name in ESTIMATED}
    longer = budgetfit.estimate(llama(), plan.recipe, max_length=following, **asked)
    assert not longer.fits
    alone(plan).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").longest_length == length


def test_several_gpus_are_asked_alike() -> None:
    asked = {**ASKED, "vram": "2300MiB", "gpus": 2, "engine": "ddp"}  # NCCL's 1600
    plan = budgetfit.plan(llama(), objective="length", max_length=300, **asked)
    assert plan.longest_length == 300
    assert plan.recipe.parallelism is not None
    longer = budgetfit.plan(llama(), max_length=300, batch_size=1, **asked)
    assert longer.recipe == plan.recipe


def test_a_given_batch_size_and_a_longest_length_of_interest_are_kept() -> None:
    plan = budgetfit.plan(
        llama(), objective="length", batch_size=2, max_length=300, **ASKED
    )
    assert plan.longest_length == 300
    assert plan.recipe.batch_size == 2
    assert "300 tokens (longer ones were not looked at)" in str(plan)


def test_where_not_even_the_shortest_fits_it_is_the_usual_error() -> None:
    asked = {**ASKED, "headroom": "184MiB", "checkpointing": "auto"}
    with pytest.raises(budgetfit.DoesNotFitError):
        budgetfit.plan(llama(), objective="length", max_length=64, **asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch": torch.zeros(2, 8, dtype=torch.long)}, "Leave batch= out"),
        ({"lengths": [512]}, "Leave lengths= out"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"max_length": 0}, "max_length must be a whole number"),
        ({"max_length": 10**9}, "max_length can be"),
    ],
)
def test_what_leaves_no_question_is_refused(
    asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(budgetfit.InputError, match=message):
        budgetfit.plan(llama(), gpu="t4", objective="length", **asked)


def test_samples_without_a_length_are_refused() -> None:
    with pytest.raises(budgetfit.InputError, match="the samples of Linear"):
        budgetfit.plan(torch.nn.Linear(4, 4), gpu="t4", objective="length")


def test_a_comparison_has_no_longest_context() -> None:
    with pytest.raises(budgetfit.InputError, match="question to one card at a time"):
        compare(llama(), ["t4", "l4"], objective="length")
