"""Gradients, optimizers and backward passes of the user's beside those of a run."""

from typing import Any

import torch
from torch import nn

import budgetfit
from budgetfit import InputError, Run, TraceError
from tests.applying.small_models import make
from tests.misuse.case import refused, right, unharmed
from tests.misuse.training import (
    accumulating,
    applied,
    apply_unharmed,
    batches,
    next_step_refused,
    options_of,
    plan_of,
    step_unharmed,
    trains_as_plain,
)
from tests.models import sgd


@trains_as_plain()
def zero_grad_between_updates(run: Run, _: object) -> None:
    """optimizer.zero_grad() after every update, left from a plain loop."""
    run.optimizer.zero_grad()


@next_step_refused("gradients", accumulates=True)
def zero_grad_in_a_group(run: Run) -> None:
    """optimizer.zero_grad() before every micro-batch of an update."""
    run.optimizer.zero_grad()


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


def _step_of_the_users_optimizer(run: Run) -> None:
    own = torch.optim.SGD(run.model.parameters(), lr=10.0)
    own.step()
    own.zero_grad()


@trains_as_plain()
def own_optimizer_between_updates(run: Run, _: object) -> None:
    """optimizer.step() of the user's own optimizer after each run.step."""
    _step_of_the_users_optimizer(run)


@next_step_refused("gradients|weights|parameters", accumulates=True)
def own_optimizer_in_a_group(run: Run) -> None:
    """optimizer.step() of the user's own optimizer after each micro-batch."""
    _step_of_the_users_optimizer(run)


@trains_as_plain()
def the_runs_optimizer_between_updates(run: Run, _: object) -> None:
    """run.optimizer.step() after each update: there are no gradients left."""
    run.optimizer.step()


@trains_as_plain()
def stray_backward_between_updates(run: Run, batch: Any) -> None:
    """A generator's backward pass through the model between two updates."""
    with torch.random.fork_rng():
        run.model(**batch).backward()


@next_step_refused("gradients", accumulates=True)
def clipping_by_hand_in_a_group(run: Run) -> None:
    """clip_grad_norm_ by hand after each micro-batch, left from a plain loop."""
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


@trains_as_plain(accumulates=True)
def gradients_read_in_a_group(run: Run, _: object) -> None:
    """The norm of gradients logged between two micro-batches."""
    for weight in run.model.parameters():
        _ = 0.0 if weight.grad is None else weight.grad.norm().item()


@refused("max_grad_norm", InputError)
def clipped_to_nothing() -> None:
    """max_grad_norm=0, which switches clipping off in transformers."""
    step_unharmed(applied(), max_grad_norm=0)


class Words(nn.Module):
    """Words with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16, sparse=True)
        self.head = nn.Linear(16, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words)).square().mean()


WORDS = {"words": torch.arange(8).reshape(4, 2)}


def _words_plan(optimizer: object, **options: Any) -> budgetfit.Plan:
    torch.manual_seed(0)
    model = Words()
    settings = options_of("stack", batch=WORDS, optimizer=optimizer, **options)
    return budgetfit.plan(model, **{**settings, "checkpointing": "none"})


@refused("sparse=True.*Set sparse=False.*one micro-batch per update", TraceError)
def sparse_gradients_accumulated() -> None:
    """nn.Embedding(sparse=True) with SGD and several micro-batches for an update."""
    _words_plan(sgd, effective_batch_size=8)


@right()
def sparse_gradients_of_a_short_group() -> None:
    """nn.Embedding(sparse=True) with SGD, in the plain way."""
    run = budgetfit.apply(_words_plan(sgd))
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
    run = budgetfit.apply(_words_plan(sgd))
    step_unharmed(run, WORDS, max_grad_norm=1.0)


@refused("LBFGS needs a closure", InputError)
def an_optimizer_with_a_closure() -> None:
    """optimizer=torch.optim.LBFGS."""
    plan_of(optimizer=torch.optim.LBFGS)


@refused("function of the parameters", InputError)
def an_optimizer_instance() -> None:
    """apply(plan, model, optimizer=AdamW(model.parameters())), not AdamW."""
    model = make("stack")
    plan = plan_of(optimizer=torch.optim.AdamW)
    made = torch.optim.AdamW(model.parameters())
    apply_unharmed(plan, model, optimizer=made)


@refused("function of the parameters", InputError)
def an_optimizer_instance_planned() -> None:
    """plan(model, optimizer=AdamW(model.parameters()))."""
    model = make("stack")
    made = torch.optim.AdamW(model.parameters())
    with unharmed(model):
        budgetfit.plan(model, **options_of("stack", optimizer=made))


def _of_another_model(_: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(make("stack").parameters(), lr=0.1)


@refused("none of the model's parameters", InputError)
def an_optimizer_of_another_model() -> None:
    """An optimizer function that closes over the parameters of another model."""
    plan = plan_of(optimizer=_of_another_model)
    apply_unharmed(plan, optimizer=_of_another_model)


@next_step_refused("run.optimizer was replaced")
def the_runs_optimizer_replaced(run: Run) -> None:
    """run.optimizer = AdamW(run.model.parameters())."""
    run.optimizer = torch.optim.AdamW(run.model.parameters())


@next_step_refused("given other parameters")
def parameters_added_to_the_optimizer(run: Run) -> None:
    """run.optimizer.add_param_group(...) for layers that are unfrozen later."""
    late = nn.Parameter(torch.zeros(4))
    run.model.register_parameter("late", late)
    run.optimizer.add_param_group({"params": [late]})


@right()
def a_hook_that_changes_gradients() -> None:
    """A gradient hook of the user's on a weight, which runs as in a plain loop."""
    model, (batch,) = make("stack"), batches(1)
    model.head.weight.register_hook(torch.zeros_like)
    before = model.head.weight.detach().clone()
    applied(model=model).step(batch)
    assert model.head.weight.equal(before)
