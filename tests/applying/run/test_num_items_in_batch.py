"""Micro-batches with different numbers of tokens train as the large batch would."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from budgetfit.applying.loss.call_model import is_transformers_model
from budgetfit.applying.run.num_items_in_batch import trainer_sums_losses
from budgetfit.applying.run.run import Run
from budgetfit.errors import InputError
from tests import models
from tests.applying.ranks.training_runs import assert_same, recipe, without_dropout
from tests.applying.small_models import batch_for, make
from tests.reporting.sample_plans import sample_model, sample_plan


def padded() -> dict[str, torch.Tensor]:
    """Return 8 samples that have from 2 to 16 labels."""
    whole = batch_for("gpt2", 8)
    for row, length in enumerate((16, 2, 5, 9, 3, 3, 2, 12)):
        whole["labels"][row, length:] = -100
    return whole


def run_of(name: str, batch_size: int, steps: int, **options: Any) -> Run:
    settings = recipe(batch_size, steps, optimizer="sgd", **options)
    return without_dropout(Run(make(name), settings, learning_rate=0.1))


def tokens(batch: dict[str, torch.Tensor]) -> int:
    """Return how many labels a causal loss is the mean of."""
    return int((batch["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_num_items_in_batch_makes_four_micro_batches_the_large_batch(name: str) -> None:
    whole = padded()
    small, large = run_of(name, 2, 4), run_of(name, 8, 1)
    shares = [
        small.step(part, num_items_in_batch=tokens(whole)).item()
        for part in small.parts(whole)
    ]
    assert sum(shares) == pytest.approx(large.step(whole).item(), rel=1e-5)
    assert small.updated
    assert_same(small, large, 1e-5)


def test_it_does_with_a_loss_in_chunks_and_a_ragged_group_too() -> None:
    whole = padded()
    small, large = run_of("gpt2", 3, 4, loss_chunks=2), run_of("gpt2", 8, 1)
    for part in small.parts(whole):
        small.step(part, num_items_in_batch=torch.tensor(tokens(whole)))
    assert small.flush()
    large.step(whole)
    assert_same(small, large, 1e-5)


def test_so_do_weights_for_a_model_that_only_knows_means() -> None:
    whole = padded()
    small, large = run_of("t5", 2, 4), run_of("t5", 8, 1)
    for part in small.parts(whole):
        small.step(part, weight=int((part["labels"] != -100).sum()))
    large.step(whole)
    assert_same(small, large, 1e-5)


def _none(part: dict[str, torch.Tensor]) -> None:
    part["labels"][:] = -100


def _half(part: dict[str, torch.Tensor]) -> None:
    part["labels"][:, :8] = -100


@pytest.mark.parametrize(
    ("name", "change", "weigh", "said"),
    [
        ("llama", _none, {}, "All labels of this micro-batch are -100.*Leave it out"),
        ("llama", _half, {}, "8 to 16 labels for each sample.*num_items_in_batch="),
        ("llama", None, {}, ""),
        ("llama", _half, {"num_items_in_batch": 48}, ""),
        ("llama", _half, {"weight": 16}, ""),
        ("t5", _half, {}, ""),  # its loss is the mean of what it likes
    ],
)
def test_other_numbers_of_labels_are_said_once(
    name: str,
    change: Callable[[dict[str, torch.Tensor]], None] | None,
    weigh: dict[str, int],
    said: str,
) -> None:
    plan = sample_plan(model=sample_model(batch={}))
    settings = recipe(2, 2, optimizer="sgd")
    run = without_dropout(Run(make(name), settings, plan=plan))
    parts = [batch_for(name, 2) for _ in range(4)]
    if change is not None:
        change(parts[1])
        change(parts[3])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for part in parts:
            run.step(part, **weigh)
    texts = [str(each.message) for each in found]
    assert len(texts) == bool(said)
    assert all(re.search(said, text) for text in texts)


def test_without_either_samples_count_and_the_large_batch_is_missed() -> None:
    whole = padded()
    small, large = run_of("gpt2", 2, 4), run_of("gpt2", 8, 1)
    for part in small.parts(whole):
        small.step(part)
    large.step(whole)
    with pytest.raises(AssertionError):
        assert_same(small, large, 1e-5)


def test_a_loss_function_that_takes_the_number_gets_it() -> None:
    def loss(
        outputs: torch.Tensor, batch: Any, num_items_in_batch: int | None = None
    ) -> torch.Tensor:
        total = nn.functional.mse_loss(outputs, batch["y"], reduction="sum")
        return total / (num_items_in_batch or batch["y"].numel())

    layers = [nn.Linear(3, 1), nn.Linear(3, 1)]
    layers[1].load_state_dict(layers[0].state_dict())
    small, large = (
        Run(model, recipe(4, steps, optimizer="sgd"), loss=loss, learning_rate=0.1)
        for model, steps in zip(layers, (2, 1), strict=True)
    )
    whole = {"input": torch.randn(7, 3), "y": torch.randn(7, 1)}
    for part in small.parts(whole):
        small.step(part, num_items_in_batch=7)
    large.step(whole)
    assert_same(small, large, 1e-5)


@pytest.mark.parametrize("name", ["t5", "stack"])
def test_a_model_that_would_not_divide_by_it_is_refused(name: str) -> None:
    run = run_of(name, 4, 2)
    with pytest.raises(InputError, match=r"does not divide .* Pass weight= instead"):
        run.step(batch_for(name), num_items_in_batch=64)
    run.step(batch_for(name))
    assert run.group.count == 1


def test_a_loss_that_does_not_take_it_is_refused() -> None:
    def loss(outputs: torch.Tensor, batch: object) -> torch.Tensor:
        del batch
        return outputs.sum()

    run = Run(nn.Linear(3, 1), recipe(), loss=loss)
    with pytest.raises(InputError, match="does not take num_items_in_batch"):
        run.step({"input": torch.ones(4, 3)}, num_items_in_batch=4)


def gpt_neox_tagger() -> nn.Module:
    """A model that has a loss function and keeps what it is given from it."""
    config = transformers.GPTNeoXConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.GPTNeoXForTokenClassification(config)


class TakesAnything(nn.Linear):
    """A model of one's own whose loss is a mean."""

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        return super().forward(x).mean()


class Around(nn.Module):
    """A model of one's own around one of transformers: the Trainer asks it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.bert()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=input_ids, labels=labels).loss
        return loss


@pytest.mark.parametrize(
    ("make_model", "sums"),
    [
        (models.bert, True),
        (models.t5, True),
        (gpt_neox_tagger, True),
        (lambda: TakesAnything(2, 2), True),
        (models.gpt2, False),
        (models.llama, False),
        (models.mixtral, False),
        (models.vit, False),
        (lambda: nn.Linear(2, 2), False),
        (Around, False),
    ],
)
def test_of_which_models_the_trainer_adds_up_losses(
    make_model: Callable[[], nn.Module], *, sums: bool
) -> None:
    """Those whose forward takes any argument and drops the number of items."""
    model = make_model()
    assert trainer_sums_losses(model) is sums
    own = next(filter(is_transformers_model, model.modules()), model)
    own.accepts_loss_kwargs = False  # the Trainer asks for this first
    assert not trainer_sums_losses(model)
