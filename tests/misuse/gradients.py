"""Gradients, optimizers and backward passes of the user's beside those of a run."""

from typing import Any

import torch
from torch import nn

import budgetfit
from budgetfit import InputError, TraceError
from tests.applying.small_models import make
from tests.misuse.case import refused, right, unharmed
from tests.misuse.training import (
    accumulating,
    applied,
    assert_trains_as_plain,
    batches,
    options_of,
    plan_of,
)


@right()
def zero_grad_between_updates() -> None:
    """optimizer.zero_grad() after every update, left from a plain loop."""
    run, data = applied(), batches(2)
    losses = []
    for batch in data:
        run.optimizer.zero_grad()
        losses.append(run.step(batch).item())
        run.optimizer.zero_grad()
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


@refused("gradients", InputError)
def zero_grad_in_a_group() -> None:
    """optimizer.zero_grad() before every micro-batch of an update."""
    run = accumulating()
    for batch in batches(2):
        run.optimizer.zero_grad()
        run.step(batch)


@refused("gradients", InputError)
def zero_grad_before_flush() -> None:
    """model.zero_grad() between the last micro-batch and flush()."""
    run = accumulating()
    run.step(batches(1)[0])
    run.model.zero_grad()
    run.flush()


@refused("does not require grad", RuntimeError)
def backward_of_the_returned_loss() -> None:
    """loss.backward() of the loss that run.step returned."""
    run = applied()
    loss = run.step(batches(1)[0])
    with unharmed(run.model):
        loss.backward()


@right()
def own_optimizer_between_updates() -> None:
    """optimizer.step() of the user's own optimizer after each run.step."""
    run, data = applied(), batches(2)
    own = torch.optim.SGD(run.model.parameters(), lr=RATE_OF_THE_USER)
    losses = []
    for batch in data:
        losses.append(run.step(batch).item())
        own.step()
        own.zero_grad()
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


RATE_OF_THE_USER = 10.0


@refused("gradients|weights|parameters", InputError)
def own_optimizer_in_a_group() -> None:
    """optimizer.step() of the user's own optimizer after each micro-batch."""
    run = accumulating()
    own = torch.optim.SGD(run.model.parameters(), lr=RATE_OF_THE_USER)
    for batch in batches(2):
        run.step(batch)
        own.step()


@refused("gradients|weights|parameters", InputError)
def the_runs_optimizer_in_a_group() -> None:
    """run.optimizer.step() after each micro-batch of an update."""
    run = accumulating()
    for batch in batches(2):
        run.step(batch)
        run.optimizer.step()


@right()
def the_runs_optimizer_between_updates() -> None:
    """run.optimizer.step() after each update: there are no gradients left."""
    run, data = applied(), batches(2)
    losses = []
    for batch in data:
        losses.append(run.step(batch).item())
        run.optimizer.step()
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


@right()
def stray_backward_between_updates() -> None:
    """A generator's backward pass through the model between two updates."""
    run, data = applied(), batches(2)
    losses = []
    for batch in data:
        losses.append(run.step(batch).item())
        with torch.random.fork_rng():
            run.model(**batch).backward()
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data])


@refused("gradients", InputError)
def stray_backward_in_a_group() -> None:
    """A generator's backward pass through the model between two micro-batches."""
    run = accumulating()
    for batch in batches(2):
        run.step(batch)
        run.model(**batch).backward()


@refused("gradients", InputError)
def clipping_by_hand_in_a_group() -> None:
    """clip_grad_norm_ by hand after each micro-batch, left from a plain loop."""
    run = accumulating()
    for batch in batches(2):
        run.step(batch)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


@right()
def gradients_read_in_a_group() -> None:
    """The norm of gradients logged between two micro-batches."""
    run, data = accumulating(), batches(4)
    losses = []
    for batch in data:
        losses.append(run.step(batch).item())
        for weight in run.model.parameters():
            _ = 0.0 if weight.grad is None else weight.grad.norm().item()
    assert_trains_as_plain(losses, run.model, [data[:2], data[2:]])


@right()
def gradients_before_apply() -> None:
    """A model that still has gradients when the plan is applied."""
    model, (batch,) = make("stack"), batches(1)
    model(**batch).backward()
    run = applied(model=model)
    assert_trains_as_plain([run.step(batch).item()], model, [[batch]])


@refused("max_grad_norm", InputError)
def clipped_to_nothing() -> None:
    """max_grad_norm=0, which switches clipping off in transformers."""
    run = applied()
    with unharmed(run.model):
        run.step(batches(1)[0], max_grad_norm=0)


@refused("max_grad_norm", InputError)
def clipped_to_a_negative_norm() -> None:
    """max_grad_norm=-1: every weight would move uphill."""
    run = applied()
    with unharmed(run.model):
        run.step(batches(1)[0], max_grad_norm=-1.0)


@refused("cannot be clipped", InputError)
def clipped_in_backward() -> None:
    """max_grad_norm with an optimizer that steps in the backward pass."""
    run = applied(optimizer_in_backward=True)
    with unharmed(run.model):
        run.step(batches(1)[0], max_grad_norm=1.0)


@refused("accumulat", InputError)
def accumulated_in_backward() -> None:
    """optimizer_in_backward=True with several micro-batches for an update."""
    plan_of(optimizer_in_backward=True, batch_size=4, effective_batch_size=8)


class Words(nn.Module):
    """Words with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16, sparse=True)
        self.head = nn.Linear(16, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words)).square().mean()


def _plain_sgd(parameters: Any) -> torch.optim.Optimizer:  # noqa: ANN401
    return torch.optim.SGD(parameters, lr=0.1)


WORDS = {"words": torch.arange(8).reshape(4, 2)}


def _words_plan(optimizer: Any, **options: Any) -> budgetfit.Plan:  # noqa: ANN401
    torch.manual_seed(0)
    model = Words()
    settings = options_of("stack", batch=WORDS, optimizer=optimizer, **options)
    return budgetfit.plan(model, **{**settings, "checkpointing": "none"})


@refused("sparse=True.*Set sparse=False", TraceError)
def sparse_gradients() -> None:
    """nn.Embedding(sparse=True) with AdamW, which does not take its gradients."""
    _words_plan("adamw_torch")


@refused("sparse=True.*Set sparse=False.*one micro-batch per update", TraceError)
def sparse_gradients_accumulated() -> None:
    """nn.Embedding(sparse=True) with SGD and several micro-batches for an update."""
    _words_plan(_plain_sgd, effective_batch_size=8)


@right()
def sparse_gradients_of_one_micro_batch() -> None:
    """nn.Embedding(sparse=True) with SGD, its one micro-batch named twice."""
    plan = _words_plan(_plain_sgd, batch_size=4, effective_batch_size=4)
    assert plan.recipe.gradient_accumulation_steps == 1


@right()
def sparse_gradients_of_a_short_group() -> None:
    """nn.Embedding(sparse=True) with SGD, in the plain way."""
    run = budgetfit.apply(_words_plan(_plain_sgd))
    plain = Words()
    plain.load_state_dict(run.model.state_dict())
    run.step(WORDS)
    plain(**WORDS).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for one, other in zip(run.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@refused("sparse", InputError)
def sparse_gradients_clipped() -> None:
    """nn.Embedding(sparse=True) with max_grad_norm."""
    run = budgetfit.apply(_words_plan(_plain_sgd))
    with unharmed(run.model):
        run.step(WORDS, max_grad_norm=1.0)


@refused("LBFGS needs a closure", InputError)
def an_optimizer_with_a_closure() -> None:
    """optimizer=torch.optim.LBFGS."""
    plan_of(optimizer=torch.optim.LBFGS)


@refused("made for the optimizer 'sgd'", InputError)
def another_optimizer_handed_in() -> None:
    """apply(plan, model, optimizer=torch.optim.AdamW) for a plan with SGD."""
    model = make("stack")
    with unharmed(model):
        budgetfit.apply(plan_of(), model, optimizer=torch.optim.AdamW)


@refused("function of the parameters", InputError)
def an_optimizer_instance() -> None:
    """apply(plan, model, optimizer=AdamW(model.parameters())), not AdamW."""
    model = make("stack")
    plan = plan_of(optimizer=torch.optim.AdamW)
    made = torch.optim.AdamW(model.parameters())
    with unharmed(model):
        budgetfit.apply(plan, model, optimizer=made)  # type: ignore[arg-type]


@refused("function of the parameters", InputError)
def an_optimizer_instance_planned() -> None:
    """plan(model, optimizer=AdamW(model.parameters()))."""
    model = make("stack")
    made = torch.optim.AdamW(model.parameters())
    with unharmed(model):
        budgetfit.plan(model, **options_of("stack", optimizer=made))


def _of_another_model(_: Any) -> torch.optim.Optimizer:  # noqa: ANN401
    return torch.optim.SGD(make("stack").parameters(), lr=0.1)


@refused("none of the model's parameters", InputError)
def an_optimizer_of_another_model() -> None:
    """An optimizer function that closes over the parameters of another model."""
    plan = plan_of(optimizer=_of_another_model)
    model = make("stack")
    with unharmed(model):
        budgetfit.apply(plan, model, optimizer=_of_another_model)


@refused("run.optimizer was replaced", InputError)
def the_runs_optimizer_replaced() -> None:
    """run.optimizer = AdamW(run.model.parameters())."""
    run = applied()
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    with unharmed(run.model):
        run.step(batches(1)[0])


@refused("given other parameters", InputError)
def parameters_added_to_the_optimizer() -> None:
    """run.optimizer.add_param_group(...) for layers that are unfrozen later."""
    model = make("stack")
    run = applied(model=model)
    late = nn.Parameter(torch.zeros(4))
    model.register_parameter("late", late)
    run.optimizer.add_param_group({"params": [late]})
    with unharmed(model):
        run.step(batches(1)[0])


@right()
def a_hook_that_changes_gradients() -> None:
    """A gradient hook of the user's on a weight, which runs as in a plain loop."""
    model, (batch,) = make("stack"), batches(1)
    model.head.weight.register_hook(torch.zeros_like)
    before = model.head.weight.detach().clone()
    applied(model=model).step(batch)
    assert model.head.weight.equal(before)
