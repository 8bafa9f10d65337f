"""apply, prepare and undo: twice, in another order, and after the end."""

import copy
from dataclasses import replace

import torch
from torch import nn

import budgetfit
from budgetfit import InputError, Run
from tests.applying.small_models import make
from tests.misuse.case import refused, right, unharmed
from tests.misuse.training import (
    accumulating,
    applied,
    apply_unharmed,
    assert_steps_as_plain,
    assert_trains_as_plain,
    batches,
    faster,
    next_step_refused,
    options_of,
    plain_losses,
    plan_of,
)
from tests.zoo.state import assert_same, model_state

TWICE = r"Stack trains by a plan already.*undo\(\)"


class Around(nn.Module):
    """A user's wrapper around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make("stack")

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.net(x, labels)


@refused(TWICE, InputError)
def apply_to_the_parent() -> None:
    """A plan of a wrapper applied while its inner model trains by a plan."""
    parent = Around()
    plan = budgetfit.plan(parent, **options_of("stack"))
    run = applied(model=parent.net)
    with unharmed(parent):
        budgetfit.apply(plan)
    run.undo()


@refused("Around trains by a plan already", InputError)
def apply_to_a_part() -> None:
    """A plan of an inner model applied while its wrapper trains by a plan."""
    parent = Around()
    run = budgetfit.apply(budgetfit.plan(parent, **options_of("stack")))
    with unharmed(parent):
        budgetfit.apply(plan_of(), parent.net)
    run.undo()


@refused(TWICE, InputError)
def prepare_twice() -> None:
    """plan.prepare(model) twice, as in a notebook cell that runs again."""
    model = make("stack")
    kept = plan_of().prepare(model)
    with unharmed(model):
        plan_of().prepare(model)
    kept.undo()


@refused(TWICE, InputError)
def prepare_then_apply() -> None:
    """plan.prepare(model), then budgetfit.apply(plan, model)."""
    model = make("stack")
    kept = plan_of().prepare(model)
    apply_unharmed(plan_of(), model)
    kept.undo()


@right()
def prepare_undo_apply() -> None:
    """Prepare, undo, and apply the same plan."""
    model = make("stack")
    plan_of().prepare(model).undo()
    assert_steps_as_plain(faster(budgetfit.apply(plan_of(), model)), batches(2))


@right()
def undo_twice() -> None:
    """undo() twice, the second time while another run trains the model."""
    model = make("stack")
    first = budgetfit.apply(plan_of(), model)
    first.undo()
    second = faster(budgetfit.apply(plan_of(), model))
    before = model_state(model)
    first.undo()
    assert_same(before, model_state(model))
    assert_steps_as_plain(second, batches(1))


@right()
def undo_in_another_order() -> None:
    """Two models of one plan, undone in the order in which they were applied."""
    models = [make("stack"), make("stack")]
    before = [model_state(model) for model in models]
    runs = [budgetfit.apply(plan_of(), model) for model in models]
    for run in runs:
        run.undo()
    for state, model in zip(before, models, strict=True):
        assert_same(state, model_state(model))


@next_step_refused("This run is undone")
def step_after_with(run: Run) -> None:
    """A step behind the with block."""
    with run:
        run.step(batches(1)[0])


@right()
def parts_after_undo() -> None:
    """run.parts(batch) after undo(): it only cuts."""
    run = applied()
    run.undo()
    (batch,) = batches(1, samples=6)
    assert [len(part["x"]) for part in run.parts(batch)] == [4, 2]


@refused("This run is undone", InputError)
def flush_after_undo() -> None:
    """flush() after undo(), with a micro-batch that waits for an update."""
    run = accumulating()
    run.step(batches(1)[0])
    run.undo()
    with unharmed(run.model):
        run.flush()


@refused("This run is undone", InputError)
def adopt_after_undo() -> None:
    """adopt() after undo(): the plain model would be changed again."""
    run = applied()
    run.undo()
    with unharmed(run.model):
        run.adopt(replace(run.recipe, batch_size=2))


@refused("This run is undone", InputError)
def load_after_undo() -> None:
    """load_state_dict() after undo(): the model may train elsewhere by now."""
    run = applied()
    state = copy.deepcopy(run.state_dict())
    run.step(batches(1)[0])
    run.undo()
    with unharmed(run.model):
        run.load_state_dict(state)


@right()
def save_after_undo() -> None:
    """state_dict() after undo(), loaded into a new run of the model."""
    data = batches(4)
    first = applied()
    losses = [first.step(batch).item() for batch in data[:2]]
    first.undo()
    state = copy.deepcopy(first.state_dict())
    second = applied()
    second.load_state_dict(state)
    losses += [second.step(batch).item() for batch in data[2:]]
    assert_trains_as_plain(losses, second.model, [[batch] for batch in data])


@right()
def undo_in_the_middle_of_a_group() -> None:
    """undo() between two micro-batches, then a plain loop on the same model."""
    run, data = accumulating(), batches(3)
    run.step(data[0])
    run.undo()
    losses = plain_losses(run.model, [[batch] for batch in data[1:]])
    assert_trains_as_plain(losses, run.model, [[batch] for batch in data[1:]])


@refused("A Recipe is expected", InputError)
def adopt_a_plan() -> None:
    """adopt() of a plan, not of its recipe."""
    run = applied()
    with unharmed(run.model):
        run.adopt(plan_of())  # type: ignore[arg-type]


@refused(r"run.adopt\(plan.recipe\)|no smaller", InputError)
def adopt_none() -> None:
    """adopt(error.recipe) where no smaller micro-batch was left."""
    run = applied()
    with unharmed(run.model):
        run.adopt(None)  # type: ignore[arg-type]


@refused("the user's", ValueError)
def an_error_inside_with() -> None:
    """An error in the user's loop inside of the with block: the model is given back."""
    model = make("stack")
    with unharmed(model), applied(model=model):
        raise ValueError("the user's")


@right()
def step_within_a_step() -> None:
    """run.step called by a hook of the model while run.step runs."""
    run, (batch,) = applied(), batches(1)
    found: list[str] = []

    def again(*_: object) -> None:
        try:
            run.step(batch)
        except InputError as error:
            found.append(str(error))

    handle = run.model.head.register_forward_pre_hook(again)
    loss = run.step(batch).item()
    handle.remove()
    assert found, "both went on"
    assert "already running" in found[0], found
    assert_trains_as_plain([loss], run.model, [[batch]])
