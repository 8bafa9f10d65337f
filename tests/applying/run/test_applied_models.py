"""A run, its model and its optimizer belong together, from apply to undo."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from budgetfit import InputError
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from tests.applying.small_models import batch_for, make

BATCH = batch_for("stack")
RECIPE = Recipe(batch_size=4, precision="fp32", optimizer="sgd")


def test_a_model_trains_by_one_plan_at_a_time() -> None:
    model = make("stack")
    names = set(dict(model.named_modules()))
    run = Run(model, Recipe(batch_size=4, segments=(Segment(("layers.0",)),)))
    for part in (model, model.get_submodule("layers.1"), nn.Sequential(model)):
        with pytest.raises(InputError, match=r"trains by a plan already.*undo\(\)"):
            Run(part, RECIPE)
    run.step(BATCH)
    run.undo()
    with Run(model, RECIPE) as again:
        again.step(BATCH)
    assert set(dict(model.named_modules())) == names


def test_a_copy_is_another_model() -> None:
    model = make("stack")
    with Run(model, RECIPE) as run, Run(copy.deepcopy(model), RECIPE) as other:
        assert run.step(BATCH).isfinite()
        assert other.step(BATCH).isfinite()


def test_a_refused_recipe_leaves_the_model_free() -> None:
    model = make("stack")
    with pytest.raises(InputError):
        Run(model, Recipe(batch_size=4, segments=(Segment(("nowhere",)),)))
    Run(model, RECIPE).undo()


def test_a_run_that_was_dropped_without_undo_is_told() -> None:
    model = make("stack")
    Run(model, RECIPE)
    gc.collect()
    with pytest.raises(InputError, match="what undoes it is gone"):
        Run(model, RECIPE)


def test_an_undone_run_does_not_step() -> None:
    run = Run(make("stack"), RECIPE)
    run.undo()
    with pytest.raises(InputError, match="This run is undone"):
        run.step(BATCH)


def _assigned(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def _new_head(model: nn.Module) -> None:
    model.head = nn.Linear(16, 4)


def _unfrozen(model: nn.Module) -> None:
    model.get_parameter("layers.0.up.weight").requires_grad_()


def _dropped_head(model: nn.Module) -> None:
    model.head = nn.Linear(16, 4).requires_grad_(requires_grad=False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_assigned, "layers.0.up.bias is not in the run's optimizer"),
        (_new_head, "head.weight is not in the run's optimizer"),
        (_unfrozen, "layers.0.up.weight is not in the run's optimizer"),
        (_dropped_head, "2 parameters of the run's optimizer are no longer"),
    ],
)
def test_parameters_that_come_after_apply_are_refused(
    change: Callable[[nn.Module], None], text: str
) -> None:
    model = make("stack")
    model.get_parameter("layers.0.up.weight").requires_grad_(requires_grad=False)
    run = Run(model, RECIPE)
    run.step(BATCH)
    change(model)
    with pytest.raises(InputError, match=text):
        run.step(BATCH)


def test_an_optimizer_may_train_a_part_and_freezing_is_no_mistake() -> None:
    model = make("stack")

    def of_the_head(_: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.head.parameters(), lr=0.1)

    run = Run(
        model,
        Recipe(
            batch_size=4,
            precision="fp32",
            optimizer=f"{__name__}.{of_the_head.__qualname__}",
        ),
        optimizer=of_the_head,
    )
    run.step(BATCH)
    model.get_parameter("layers.1.up.weight").requires_grad_(requires_grad=False)
    run.step(BATCH)
    assert run.steps_done == 2


def test_gradients_of_other_backward_passes_are_no_part_of_a_step() -> None:
    # A generator's backward pass goes through the discriminator.
    losses = []
    for stray in (False, True):
        model = make("stack").eval()
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        with Run(model, RECIPE, learning_rate=0.1) as run:
            for _ in range(3):
                losses.append(run.step(BATCH).item())
                if stray:
                    model(**BATCH).backward()
    assert losses[:3] == losses[3:]
