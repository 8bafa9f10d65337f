"""Plans of small models, made once, and the plain loops that runs are compared with."""

import copy
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

import budgetfit
from tests.api.planned import CARD
from tests.applying.small_models import batch_for, make
from tests.models import alone, counting_hook

RATE = 0.1
SAMPLES = 4


def options_of(kind: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of ``plan``: fp32, SGD and every block recomputed."""
    return {
        "gpu": CARD,
        "batch": batch_for(kind, SAMPLES),
        "batch_size": SAMPLES,
        "precision": "fp32",
        "optimizer": "sgd",
        "checkpointing": "full",
        **options,
    }


@functools.cache
def plan_of(kind: str = "stack", **options: Any) -> budgetfit.Plan:
    """Return a plan of a small model, which does not hold that model."""
    made = budgetfit.plan(make(kind), **options_of(kind, **options))
    return alone(made).changed(source=None)


def applied(
    kind: str = "stack", model: nn.Module | None = None, **options: Any
) -> budgetfit.Run:
    """Return a run of a small model, with a rate at which it learns."""
    model = make(kind) if model is None else model
    return faster(budgetfit.apply(plan_of(kind, **options), model))


def accumulating(kind: str = "stack", micro_batches: int = 2) -> budgetfit.Run:
    """Return a run that updates its weights with several micro-batches."""
    return applied(kind, effective_batch_size=micro_batches * SAMPLES)


def faster(run: budgetfit.Run) -> budgetfit.Run:
    """Give a run another learning rate, and the random numbers of ``plain_losses``."""
    for group in run.optimizer.param_groups:
        group["lr"] = RATE
    torch.manual_seed(5)
    return run


def batches(count: int, kind: str = "stack", samples: int = SAMPLES) -> list[Any]:
    """Return different batches; draws nothing from the global generator."""
    whole = batch_for(kind, samples * count)
    return [
        {name: item[at : at + samples] for name, item in whole.items()}
        for at in range(0, samples * count, samples)
    ]


def plain_losses(model: nn.Module, groups: Iterable[Sequence[Any]]) -> list[float]:
    """Train in a loop that knows nothing of budgetfit.

    Args:
        model: Put into training mode.
        groups: The micro-batches of each update, all of as many samples.
    """
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    torch.manual_seed(5)
    losses = []
    for group in groups:
        for batch in group:
            outputs = model(**batch)
            loss = getattr(outputs, "loss", outputs)
            (loss / len(group)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_trains_as_plain(
    losses: Sequence[float],
    model: nn.Module,
    groups: Iterable[Sequence[Any]],
    kind: str = "stack",
) -> None:
    """Assert that losses and weights are those of a plain loop over these groups."""
    plain = make(kind)
    expected = plain_losses(plain, groups)
    assert losses == expected, f"losses {losses}, not {expected}"
    assert_same_weights(model, plain)


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    """Assert that two models have the same parameters, up to rounding."""
    names = dict(other.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, names[name], msg=f"{name} differs")


def variant(kind: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Return a small model of transformers with another config."""
    model = make(kind)
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    build: Any = type(model)._from_config  # noqa: SLF001 - what from_config calls
    return build(config, attn_implementation=attention).train()


def block_runs(model: nn.Module, name: str) -> Counter[str]:
    """Return the number of runs of a layer inside a block, by the block's name."""
    runs: Counter[str] = Counter()
    inner = next(iter(model.get_submodule(name).children()))
    inner.register_forward_pre_hook(counting_hook(runs, name))
    return runs
