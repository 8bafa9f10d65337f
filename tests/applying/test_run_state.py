# ruff: noqa: ANN401, N802 - states hold anything; tests of user needs carry their number

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from budgetfit.applying.run.rng_states import get_rng_states, set_rng_states
from budgetfit.applying.run.run import Run
from budgetfit.errors import InputError
from tests.applying.small_models import make
from tests.applying.training_runs import (
    PAIRS,
    assert_same,
    batches,
    losses,
    recipe,
    start,
)

CPU = torch.device("cpu")


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load as a user should: no pickled code, nothing on the device."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


@pytest.mark.parametrize("done", [1, 2, 5])
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_a_resumed_run_goes_on_bit_for_bit_with_dropout_and_in_a_group(
    done: int, precision: str
) -> None:
    # Groups of 3: after 1, 2 and 5 micro-batches, always in the middle of one.
    settings = recipe(4, 3, segments=PAIRS, precision=precision)
    data = batches(8)
    whole, first = start(settings), start(settings)
    expected = losses(whole, data)
    torch.manual_seed(5)
    losses(first, data[:done])
    state = through_a_file(first.state_dict())
    torch.manual_seed(99)
    resumed = start(settings)
    resumed.load_state_dict(state)
    assert losses(resumed, data[done:]) == expected[done:]
    assert_same(resumed, whole)
    counts = (whole.steps_done, whole.skipped_steps)
    assert (resumed.steps_done, resumed.skipped_steps) == counts


def test_between_groups_no_gradients_are_saved() -> None:
    run = start(recipe(4, 2))
    losses(run, batches(2))
    assert run.state_dict()["gradients"] is None


def test_a_group_that_was_resumed_does_not_share_gradients_with_the_state() -> None:
    run = start(recipe(4, 3))
    losses(run, batches(1))
    state = run.state_dict()
    other = start(recipe(4, 3))
    other.load_state_dict(state)
    before = state["gradients"][0].clone()
    losses(other, batches(1))
    assert torch.equal(state["gradients"][0], before)


def test_U15_the_scalers_state_is_saved_and_restored() -> None:
    settings = recipe(precision="fp16-mixed")
    run = start(settings)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    losses(run, batches(3))  # each overflows and halves the scale
    resumed = start(settings)
    resumed.load_state_dict(through_a_file(run.state_dict()))
    assert resumed.scaler is not None
    assert resumed.scaler.get_scale() == 2.0**37
    assert resumed.skipped_steps == 3


def test_states_of_older_versions_are_read() -> None:
    run = start()
    losses(run, batches(2))
    old = {name: run.state_dict()[name] for name in ("model", "optimizer", "scaler")}
    resumed = start()
    resumed.load_state_dict(through_a_file(old))
    assert_same(resumed, run)
    assert resumed.steps_done == 0


def test_random_generators_stay_where_they_are_if_asked() -> None:
    run = start()
    state = run.state_dict()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    run.load_state_dict(state, random=False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["model"].pop("head.bias"), r"state has no 'head\.bias'"),
        (
            lambda state: state["model"].update(extra=torch.ones(1)),
            "model has no 'extra'",
        ),
        (
            lambda state: state["model"].update({"head.bias": torch.ones(9)}),
            r"'head\.bias' is \[9\] in the state and \[4\] in the model",
        ),
        (
            lambda state: state["optimizer"]["param_groups"][0].update(params=[0]),
            r"another optimizer: it has \[1\] parameters",
        ),
    ],
)
def test_the_state_of_another_model_is_refused_before_anything_is_loaded(
    change: Any, message: str
) -> None:
    trained, run, fresh = start(), start(), Run(make("stack"), recipe(segments=PAIRS))
    losses(trained, batches(1))
    state = through_a_file(trained.state_dict())
    change(state)
    with pytest.raises(InputError, match=message):
        run.load_state_dict(state)
    assert_same(run, fresh)
    assert not run.optimizer.state


def test_torch_python_and_numpy_draw_again_what_they_drew() -> None:
    state = through_a_file(get_rng_states(CPU))

    def draw() -> tuple[float, ...]:
        # A normal number first: generators keep the second one of each pair.
        normal = np.random.normal()  # noqa: NPY002 - the global generator
        return torch.rand(()).item(), random.random(), random.gauss(0, 1), normal  # noqa: S311

    first = draw()
    assert draw() != first
    set_rng_states(state, CPU)
    assert draw() == first
