"""A user's own DDP around a run for one GPU, on two processes with gloo."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import budgetfit
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe
from tests.gloo_ranks import on_ranks
from tests.integrations.tiny_training import ACCUMULATION, LENGTH, plan_for, tiny_model
from tests.models import squares

SIZES = ((3, 2), (1, 3))  # samples of each rank's micro-batches
TOKENS = ((10.0, 30.0), (10.0, 10.0))
ITEMS = (40, 20)  # a rank's own, in all micro-batches of an update
EQUAL = 1e-6


def share(
    outputs: torch.Tensor, _: torch.Tensor, num_items_in_batch: float
) -> torch.Tensor:
    return outputs.square().sum() / num_items_in_batch


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def samples(rank: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    return torch.randn(SIZES[rank][micro_batch], 4, generator=generator)


def settings(weighed: str, rank: int, micro_batch: int) -> dict[str, Any]:
    if weighed == "tokens":
        return {"weight": TOKENS[rank][micro_batch]}
    return {"num_items_in_batch": ITEMS[rank]} if weighed == "items" else {}


def _train(weighed: str) -> tuple[list[float], list[float]]:
    """Losses and weights after an update and a micro-batch that is flushed."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    recipe = Recipe(batch_size=3, gradient_accumulation_steps=2, optimizer="sgd")
    loss = share if weighed == "items" else squares
    run = Run(model(), recipe, loss=loss, learning_rate=0.1)
    plain = run.model
    run.model = DistributedDataParallel(plain)
    losses = [
        float(run.step(samples(rank, at), **settings(weighed, rank, at)))
        for at in range(2)
    ]
    if weighed != "items":
        run.step(samples(rank, 0), **settings(weighed, rank, 0))
        run.flush()
    return losses, torch.cat(
        [p.detach().flatten() for p in plain.parameters()]
    ).tolist()


def _expected(weighed: str) -> list[float]:
    """The weights that one process gets with the mean over all samples."""
    plain = model()
    updates = [(0, 1)] if weighed == "items" else [(0, 1), (0,)]
    for parts in updates:
        total, whole = torch.zeros(()), 0.0
        for rank in range(2):
            for at in parts:
                data = samples(rank, at)
                if weighed == "items":
                    total = total + plain(data).square().sum()
                    continue
                tokens = TOKENS[rank][at] if weighed == "tokens" else len(data)
                total, whole = (
                    total + tokens * squares(plain(data), data),
                    whole + tokens,
                )
        mean = total / (whole or sum(ITEMS))
        gradients = torch.autograd.grad(mean, list(plain.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(plain.parameters(), gradients, strict=True):
                weight.sub_(0.1 * gradient)
    return torch.cat([p.detach().flatten() for p in plain.parameters()]).tolist()


@pytest.mark.parametrize("weighed", ["samples", "tokens", "items"])
def test_ranks_of_an_own_wrapper_take_the_mean_over_all_samples(weighed: str) -> None:
    found = on_ranks(_train, 2, weighed)
    for rank, (losses, weights) in enumerate(found):
        assert weights == found[0][1]
        assert weights == pytest.approx(_expected(weighed), abs=EQUAL)
        data = samples(rank, 0)
        if weighed == "items":
            own = model()(data).square().sum() / sum(ITEMS)
        else:
            own = squares(model()(data), data)
        # A rank's own, as of a loop with such a wrapper.
        assert losses[0] == pytest.approx(own.item(), abs=EQUAL)


def _longest_first() -> list[tuple[list[int], list[float]]]:
    """Shapes that run, and losses; the batches of rank 1 are shorter than planned."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    found = []
    for first in (True, False):
        planned = tiny_model("llama")
        settings = {"optimizer": "sgd", "longest_batch_first": first}
        run = budgetfit.apply(plan_for(planned, (), **settings), planned)
        seen: list[int] = []
        held = functools.cache(lambda seen=seen: seen)  # what a run does not restore
        planned.register_forward_pre_hook(
            lambda _, __, given, held=held: held().append(given["input_ids"].shape[1]),
            with_kwargs=True,
        )
        run.model = DistributedDataParallel(planned)
        ids = torch.arange(3 * (LENGTH - 2 * rank)).view(3, -1)
        batch = {"input_ids": ids, "labels": ids}
        losses = [float(run.step(batch)) for _ in range(3 * ACCUMULATION)]
        found.append((seen, losses))
    return found


def test_ranks_of_an_own_wrapper_begin_with_the_longest_batch_together() -> None:
    """One that did so alone would wait for the others, or reduce with their steps."""
    for rank, (first, without) in enumerate(on_ranks(_longest_first, 2)):
        own = LENGTH - 2 * rank
        assert without[0] == [own] * 3 * ACCUMULATION
        assert first[0] == [LENGTH] * ACCUMULATION + without[0]
        assert first[1] == pytest.approx(without[1], abs=EQUAL)
