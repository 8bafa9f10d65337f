"""Plans of small models, made once, and the plain loops that runs are compared with."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import budgetfit
from budgetfit import InputError
from tests.api.planned import CARD
from tests.applying.small_models import batch_for, make
from tests.misuse.case import refused, right, unharmed
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


def accumulating(kind: str = "stack") -> budgetfit.Run:
    """Return a run that updates its weights with two micro-batches."""
    return applied(kind, effective_batch_size=2 * SAMPLES)


def step_unharmed(run: budgetfit.Run, *batch: Any, **options: Any) -> None:
    """Train on a batch, by default a right one of a stack."""
    with unharmed(run.model):
        run.step(*(batch or batches(1)), **options)


def apply_unharmed(
    plan: budgetfit.Plan, model: nn.Module | None = None, **options: Any
) -> None:
    """Apply a plan to a model, by default a new stack."""
    model = make("stack") if model is None else model
    with unharmed(model):
        budgetfit.apply(plan, model, **options)


def next_step_refused(
    words: str, kind: str = "stack", *, accumulates: bool = False, **options: Any
) -> Callable[[Callable[[budgetfit.Run], object]], None]:
    """Declare that a step is refused after what the function does to a run.

    ``accumulates``: it does so between two micro-batches of an update.
    """

    def declare(change: Callable[[budgetfit.Run], object]) -> None:
        @refused(words, InputError)
        @functools.wraps(change)
        def do() -> None:
            first, second = batches(2, kind)
            if accumulates:  # the micro-batches of the update are dropped
                run = accumulating(kind)
                run.step(first)
                change(run)
                run.step(second)
            else:
                run = applied(kind, **options)
                change(run)
                step_unharmed(run, first)

    return declare


def trains_as_plain(
    kind: str = "stack", *, accumulates: bool = False
) -> Callable[[Callable[[budgetfit.Run, Any], object]], None]:
    """Declare that a run trains as a plain loop whatever the function does.

    It is called before the first step and after each, with the next batch or the last.
    """

    def declare(around: Callable[[budgetfit.Run, Any], object]) -> None:
        @right()
        @functools.wraps(around)
        def do() -> None:
            run = accumulating(kind) if accumulates else applied(kind)
            model, data, losses = run.model, batches(4, kind), []
            around(run, data[0])
            for batch in data:
                losses.append(run.step(batch).item())
                around(run, batch)
            size = 2 if accumulates else 1
            groups = [data[at : at + size] for at in range(0, len(data), size)]
            assert_trains_as_plain(losses, model, groups, kind)

    return declare


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


def assert_steps_as_plain(
    run: budgetfit.Run, data: Sequence[Any], kind: str = "stack"
) -> None:
    """Train an update on each batch, and assert that a plain loop does the same."""
    losses = [run.step(batch).item() for batch in data]
    model = getattr(run.model, "module", run.model)  # of a wrapper
    assert_trains_as_plain(losses, model, [[batch] for batch in data], kind)


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


def block_runs(model: nn.Module, name: str) -> Counter[str]:
    """Return the number of runs of a layer inside a block, by the block's name."""
    runs: Counter[str] = Counter()
    inner = next(iter(model.get_submodule(name).children()))
    inner.register_forward_pre_hook(counting_hook(runs, name))
    return runs
