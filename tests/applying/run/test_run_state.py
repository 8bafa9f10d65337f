import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from budgetfit.applying.run.rng_states import get_rng_states, set_rng_states
from budgetfit.applying.run.run import Run
from budgetfit.errors import InputError
from tests.applying.ranks.training_runs import (
    PAIRS,
    assert_same,
    batches,
    losses,
    recipe,
    start,
    without_dropout,
)
from tests.applying.small_models import make

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


def test_a_weight_of_numpy_is_saved_as_a_number() -> None:
    first = start(recipe(4, 2))
    first.step(batches(1)[0], weight=np.int64(12))  # type: ignore[arg-type]
    assert through_a_file(first.state_dict())


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


def test_the_scalers_state_is_saved_and_restored() -> None:
    settings = recipe(precision="fp16-mixed")
    run = start(settings)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    losses(run, batches(3))  # each overflows and halves the scale
    resumed = start(settings)
    resumed.load_state_dict(through_a_file(run.state_dict()))
    assert resumed.scaler is not None
    assert resumed.scaler.get_scale() == 2.0**37
    assert resumed.skipped_steps == 3


def in_a_group(
    precision: str, inputs: list[dict[str, torch.Tensor]], scale: float = 2.0**8
) -> Run:
    """Return a run without dropout whose group of 3 has these micro-batches."""
    run = without_dropout(start(recipe(4, 3, precision=precision, optimizer="sgd")))
    if run.scaler is not None:
        run.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    losses(run, inputs)
    return run


def scale_of(run: Run) -> float:
    return 1.0 if run.scaler is None else run.scaler.get_scale()


@pytest.mark.parametrize(
    "precisions",
    [
        ("fp16-mixed", "bf16-mixed"),
        ("fp32", "fp16-mixed"),
        ("fp16-mixed", "fp16-mixed"),
        ("fp16-mixed", "bf16-mixed", "fp16-mixed"),
    ],
)
def test_a_group_goes_on_in_another_precision_with_gradients_of_its_scale(
    precisions: tuple[str, ...],
) -> None:
    data = batches(3)
    first = run = in_a_group(precisions[0], data[:1])
    for precision in precisions[1:]:
        state = through_a_file(run.state_dict())
        run = in_a_group(precision, [], scale=2.0**5)
        run.load_state_dict(state)
    for loaded, saved in zip(run.trained, first.trained, strict=True):
        assert loaded.grad is not None
        assert saved.grad is not None
        # Scales are powers of two: nothing is rounded.
        factor = scale_of(run) / scale_of(first)
        assert torch.equal(loaded.grad, saved.grad * factor)
    losses(run, data[1:])
    assert run.updated
    assert_same(run, in_a_group("fp32", data), tolerance=1e-3)


def test_gradients_that_overflowed_are_not_loaded_where_no_scaler_skips_them() -> None:
    run = in_a_group("fp16-mixed", batches(1), scale=2.0**40)
    state = through_a_file(run.state_dict())
    other, fresh = in_a_group("bf16-mixed", []), in_a_group("bf16-mixed", [])
    with pytest.raises(InputError, match=r"loss scale of 1,099,.*use a state saved"):
        other.load_state_dict(state)
    assert_same(other, fresh)
    assert other.group.count == 0
    same = in_a_group("fp16-mixed", [])
    same.load_state_dict(state)
    losses(same, batches(2))
    assert (same.updated, same.skipped_steps) == (False, 1)
    assert_same(same, fresh)


def test_gradients_that_overflow_in_the_scale_they_are_loaded_into_are_skipped() -> (
    None
):
    run = in_a_group("fp32", batches(1))
    state = through_a_file(run.state_dict())
    state["gradients"][0].fill_(1e38)
    other = in_a_group("fp16-mixed", [])
    other.load_state_dict(state)
    losses(other, batches(2))
    assert (other.updated, other.skipped_steps) == (False, 1)


def test_states_of_older_versions_are_read() -> None:
    run = start()
    losses(run, batches(2))
    old = {name: run.state_dict()[name] for name in ("model", "optimizer", "scaler")}
    resumed = start()
    resumed.load_state_dict(through_a_file(old))
    assert_same(resumed, run)
    assert resumed.steps_done == 0


def test_an_error_in_a_group_that_was_loaded_restores_what_was_loaded() -> None:
    first = start(recipe(4, 3))
    losses(first, batches(1))
    state = through_a_file(first.state_dict())
    run = start(recipe(4, 3))
    torch.manual_seed(7)
    losses(run, batches(1))  # and so before another group
    run.load_state_dict(state)
    before = torch.get_rng_state()
    wrong = torch.zeros(4, 1, device="meta")
    with pytest.raises(Exception, match=r"meta|Expected"):
        run.step((wrong, wrong))
    assert torch.equal(torch.get_rng_state(), before)


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
        (
            lambda state: state["optimizer"]["param_groups"][0].update(params=["x"]),
            r"it has \[1\] parameters in its groups",
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
    waiting = start(recipe(4, 3))
    losses(waiting, batches(1))
    with pytest.raises(InputError, match=message):
        waiting.load_state_dict(state)
    assert waiting.group.count == 1


def test_torch_python_and_numpy_draw_again_what_they_drew() -> None:
    state = through_a_file(get_rng_states(CPU))

    def draw() -> tuple[float, ...]:
        # A normal number first: generators keep the second one of each pair.
        normal = np.random.normal()  # noqa: NPY002 - the global generator
        return torch.rand(()).item(), random.random(), random.gauss(0, 1), normal

    first = draw()
    assert draw() != first
    set_rng_states(state, CPU)
    assert draw() == first
