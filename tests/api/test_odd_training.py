"""Training that cannot be planned in the usual way is planned, or refused truly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import InputError, TraceError
from tests import models
from tests.api.planned import CARD
from tests.integrations.adapters import QUIET
from tests.models import LENGTH, VOCABULARY, WIDTH, sgd

pytestmark = QUIET


def plan(model: nn.Module, **options: Any) -> budgetfit.Plan:
    return budgetfit.plan(model, gpu=CARD, **{"batch_size": 2, **options})


def test_an_optimizer_that_runs_the_model_itself_is_refused() -> None:
    with pytest.raises(InputError, match=r"LBFGS needs a closure.*adamw_torch_fused"):
        plan(nn.Linear(4, 4), batch=torch.zeros(2, 4), optimizer=torch.optim.LBFGS)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.words(words)


def test_sparse_gradients_that_an_optimizer_refuses_are_named() -> None:
    batch = torch.zeros(2, LENGTH, dtype=torch.int64)
    model = nn.Sequential(Words(), nn.Linear(WIDTH, 1))
    with pytest.raises(TraceError, match=r"sparse=True.* Set sparse=False") as refused:
        plan(model, batch=batch)
    assert "example batch" not in str(refused.value)
    assert plan(model, batch=batch, optimizer=sgd).fits


class Graph(nn.Module):
    """Sums each node's neighbours, or pools the nodes of a graph."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.op = op

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for layer in self.layers:
            sent = layer(x)
            if self.op == "gather":
                sent = sent.gather(0, source[:, None].expand(-1, 4))
            elif self.op == "index":
                sent = sent[source]
            else:
                sent = sent.index_select(0, source)
            x = torch.zeros_like(x).index_add(0, target, sent)
        return x


@pytest.mark.parametrize("op", ["gather", "index", "index_select"])
def test_a_graph_whose_edges_point_outside_of_a_smaller_batch_is_planned_as_it_is(
    op: str,
) -> None:
    batch = {"x": torch.zeros(9, 4), "edges": torch.tensor([[0, 8, 4], [3, 7, 2]])}
    made = plan(Graph(op), batch=batch, batch_size=None)
    assert made.recipe.batch_size == 9
    (note,) = [each for each in made.warnings if "as the example has" in each]
    assert "index 8 is out of bounds" in note
    assert "edges of a graph" in note
    assert budgetfit.estimate(Graph(op), gpu=CARD, batch=batch).recipe.batch_size == 9


def test_edges_within_each_sample_are_no_reason() -> None:
    batch = {"x": torch.zeros(4, 4), "edges": torch.tensor([[0, 1, 0], [1, 0, 1]])}
    assert plan(Graph("index"), batch=batch).fits


def test_a_prefix_in_the_cache_is_planned_without_recomputation() -> None:
    peft = pytest.importorskip("peft")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(models.llama(), prefix)
    made = plan(model, max_length=LENGTH)

    assert made.recipe.segments == ()
    assert "transformers drops where a block is recomputed" in str(made.warnings)
    assert budgetfit.verify(made, device="cpu").gradients_match


class Masked(nn.Module):
    """A layer over masked inputs, inside another that has the mask or drops it."""

    def __init__(self, read: Callable[[torch.Tensor], object] | None) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        if self.read is not None:
            x = x * self.read(given["mask"])
        return self.layer(x)


READS: dict[str, Callable[[torch.Tensor], object] | None] = {
    "nothing": None,
    "ops": lambda mask: mask,
    "a view": lambda mask: mask.unsqueeze(0)[0],
    "a list": lambda mask: len(mask.tolist()),
    "an array": lambda mask: mask.numpy().size,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("in_loss", [False, True])
def test_what_a_forward_takes_and_drops_is_said(read: str, *, in_loss: bool) -> None:
    def loss(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (out * batch["mask"] if in_loss else out).mean()

    batch = {"x": torch.zeros(2, 4), "mask": torch.ones(2, 4, dtype=torch.int64)}
    model = Masked(READS[read])
    found = budgetfit.estimate(
        model, budgetfit.Recipe(batch_size=2), gpu=CARD, batch=batch, loss=loss
    )
    made = plan(model, batch=batch, loss=loss)
    dropped = read == "nothing" and not in_loss
    for notes in (found.notes, made.estimate.notes):
        assert [each[:31] for each in notes if "reads" in each] == (
            ["nothing reads mask of the batch"] * dropped
        )
