import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

import budgetfit
from budgetfit.applying.optimizers.in_backward import OptimizerInBackward
from budgetfit.applying.out_of_memory.error import TrainingOutOfMemoryError
from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import CATEGORIES
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.measuring import compare_gradients
from budgetfit.memory.replay import replay
from budgetfit.utils.function_name import qualified_name
from tests.applying.ranks.live_bytes import LiveBytes
from tests.traced import ADA, session

WIDTH = 64
KEPT: tuple[Segment, ...] = ()
RECOMPUTED = (Segment(("1", "2")), Segment(("3",)))


class TiedStack(torch.nn.Sequential):
    """Blocks of which the first and the last share a weight."""

    def __init__(self) -> None:
        super().__init__(*(_block() for _ in range(5)))
        self[4][0].weight = self[0][0].weight


def _block() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())


def loss(outputs: torch.Tensor, _batch: object) -> torch.Tensor:
    return (outputs - 1).square().mean()


def run_of(model: torch.nn.Module, **settings: Any) -> Run:
    return Run(model, Recipe(batch_size=4, **settings), loss=loss)


def losses(run: Run, steps: int = 4, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(4, WIDTH, generator=generator) for _ in range(steps)]
    return [run.step(batch).item() for batch in batches]


@pytest.mark.parametrize("segments", [KEPT, RECOMPUTED], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "sgd", "adagrad"])
def test_it_trains_bit_for_bit_as_a_step_at_the_end(
    name: str, segments: tuple[Segment, ...]
) -> None:
    model = TiedStack()
    other = copy.deepcopy(model)
    plain = run_of(model, optimizer=name, segments=segments)
    early = run_of(other, optimizer=name, segments=segments, optimizer_in_backward=True)
    assert losses(plain) == losses(early)
    assert early.steps_done == 4
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert two.grad is None


def test_gradients_of_all_weights_never_exist_together() -> None:
    def peak_over_weights(*, in_backward: bool) -> int:
        model = torch.nn.Sequential(*(_block() for _ in range(20)))
        run = run_of(model, optimizer="sgd", optimizer_in_backward=in_backward)
        losses(run, 1)
        with LiveBytes() as meter:
            losses(run, 1)
        return meter.peak_bytes

    weights = 20 * 4 * WIDTH * (WIDTH + 1)
    saved = peak_over_weights(in_backward=False) - peak_over_weights(in_backward=True)
    assert 0.8 * weights < saved <= weights


def test_what_is_predicted_has_no_gradients_at_once_and_the_same_states() -> None:
    # 6 weights of 1 MiB, fused AdamW: 2 MiB of states each, and a step count.
    early = Recipe(batch_size=2, optimizer_in_backward=True)
    late = Recipe(batch_size=2)
    ours, plain = (session("mebi").affine(each) for each in (early, late))
    optimizer_state = CATEGORIES.index("optimizer_state")
    kept = [
        trace.fixed_bytes[trace.category == optimizer_state].sum()
        for trace in (ours, plain)
    ]
    assert kept[0] == kept[1]
    gradients = CATEGORIES.index("gradients")
    assert not (ours.category == gradients).any()
    lines = [replay(each, 2, find_gpu(ADA)) for each in (ours, plain)]
    peaks = [line.phase_peaks_bytes["optimizer"] for line in lines]
    assert peaks[0] < peaks[1]


def test_accumulation_clipping_and_a_scaler_are_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="nothing to add the next micro-batch's to"):
        Recipe(batch_size=1, gradient_accumulation_steps=2, optimizer_in_backward=True)
    run = run_of(TiedStack(), optimizer_in_backward=True)
    before = copy.deepcopy(run.model.state_dict())
    with pytest.raises(InputError, match="cannot be clipped"):
        run.step(torch.ones(4, WIDTH), max_grad_norm=1.0)
    assert all(torch.equal(before[key], run.model.state_dict()[key]) for key in before)
    model = TiedStack()
    with pytest.raises(InputError, match="there can be no GradScaler"):
        run_of(model, precision="fp16-mixed", optimizer_in_backward=True)
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())


def test_undo_takes_the_hooks_away() -> None:
    model = TiedStack()
    run = run_of(model, optimizer_in_backward=True)
    losses(run, 1)
    run.undo()
    before = copy.deepcopy(model.state_dict())
    loss(model(torch.ones(4, WIDTH)), None).backward()
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in before)
    assert all(each.grad is not None for each in model.parameters())


def decayed(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay for matrices alone: of one parameter, one of the groups is empty."""
    groups = [
        {"params": [x for x in parameters if x.ndim > 1], "weight_decay": 0.1},
        {"params": [x for x in parameters if x.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def run_of_groups(model: torch.nn.Module) -> Run:
    recipe = Recipe(
        batch_size=4, optimizer=qualified_name(decayed), optimizer_in_backward=True
    )
    return Run(model, recipe, loss=loss, optimizer=decayed)


@pytest.mark.parametrize(
    "start", [partial(run_of, optimizer_in_backward=True), run_of_groups]
)
def test_a_saved_run_goes_on_bit_for_bit(
    start: Callable[[torch.nn.Module], Run],
) -> None:
    model = TiedStack()
    other = copy.deepcopy(model)
    whole = start(model)
    losses(whole)
    saved = copy.deepcopy(whole.state_dict())
    expected = losses(whole, seed=2)
    resumed = start(other)
    resumed.load_state_dict(saved)
    assert losses(resumed, seed=2) == expected


def test_the_state_of_another_optimizer_is_refused() -> None:
    run = run_of(TiedStack(), optimizer_in_backward=True)
    for state in ({"state": {}, "param_groups": []}, {"single": []}):
        with pytest.raises(InputError, match="no state of this optimizer"):
            run.optimizer.load_state_dict(state)


def test_learning_rate_schedulers_reach_every_weight() -> None:
    run = run_of(TiedStack(), optimizer="sgd", optimizer_in_backward=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: step)
    before = copy.deepcopy(run.model.state_dict())
    losses(run, 1)  # at a learning rate of 0
    assert all(torch.equal(before[key], run.model.state_dict()[key]) for key in before)
    scheduler.step()
    losses(run, 1)
    after = run.model.state_dict()
    assert not any(torch.equal(before[key], after[key]) for key in before)


def test_a_first_step_that_fails_leaves_no_half_of_a_state() -> None:
    def failing(parameters: list[Any]) -> torch.optim.Optimizer:
        made: Any = torch.optim.AdamW(parameters)
        step: Callable[..., Any] = made.step

        def stopped() -> None:
            made.state[parameters[0]]["step"] = torch.tensor(0.0)
            if armed:
                raise torch.OutOfMemoryError("no memory for exp_avg")
            made.state.clear()
            step()

        made.step = stopped
        return made

    armed = [True]
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = OptimizerInBackward([weight], failing)
    with pytest.raises(torch.OutOfMemoryError):
        weight.sum().backward()
    assert not optimizer.state
    armed.clear()
    weight.grad = None
    weight.sum().backward()
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_running_out_in_the_middle_says_that_weights_were_changed() -> None:
    model = TiedStack()
    run = run_of(model, optimizer_in_backward=True)
    handle = model[2].register_full_backward_hook(_no_memory)
    with pytest.raises(TrainingOutOfMemoryError) as caught:
        losses(run, 1)
    assert not caught.value.weights_intact
    handle.remove()
    model[4].register_full_backward_pre_hook(_no_memory)  # before any update
    with pytest.raises(TrainingOutOfMemoryError) as caught:
        losses(run, 1)
    assert caught.value.weights_intact


def _no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 MiB.")


def test_frozen_weights_have_no_optimizer_and_a_frozen_model_is_refused() -> None:
    model = TiedStack()
    model[1].requires_grad_(False)
    run = run_of(model, optimizer_in_backward=True)
    assert len(run.optimizer.param_groups) == 7
    losses(run, 1)
    run.undo()
    model.requires_grad_(False)
    with pytest.raises(InputError, match="no trainable parameter"):
        run_of(model, optimizer_in_backward=True)


def test_a_recipe_saved_before_is_one_without_it() -> None:
    reader = TypeAdapter(Recipe)
    old = json.loads(reader.dump_json(Recipe(batch_size=2)))
    del old["optimizer_in_backward"]
    assert reader.validate_python(old) == Recipe(batch_size=2)
    early = Recipe(batch_size=2, optimizer_in_backward=True)
    assert reader.validate_json(reader.dump_json(early)) == early


def test_verify_compares_gradients_that_are_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = TiedStack()
    plan = budgetfit.plan(
        model, gpu=ADA, batch=torch.zeros(2, WIDTH), loss=loss, batch_size=4
    )
    recipe = replace(plan.recipe, precision="fp32", optimizer_in_backward=True)
    seen = []

    def watch(gradient: torch.Tensor | None, plain: torch.Tensor | None) -> float:
        seen.append((gradient is None, plain is None))
        return 0.0

    monkeypatch.setattr(compare_gradients, "_relative_error", watch)
    budgetfit.verify(plan.changed(recipe=recipe), device="cpu")
    assert set(seen) == {(False, False)}


def test_a_plan_has_one_backward_for_each_update() -> None:
    model, batch = _block(), torch.zeros(2, WIDTH)
    asked = {"gpu": "rtx-4090", "batch": batch, "optimizer_in_backward": True}
    recipe = budgetfit.plan(model, effective_batch_size=8, loss=loss, **asked).recipe
    assert (recipe.batch_size, recipe.gradient_accumulation_steps) == (8, 1)


def test_other_backward_passes_update_nothing() -> None:
    """A generator trains through the discriminator, which is no step of that one."""
    discriminator, generator = TiedStack(), torch.nn.Linear(WIDTH, WIDTH)
    other = copy.deepcopy(discriminator)
    run = run_of(discriminator, optimizer="sgd", optimizer_in_backward=True)
    for _ in range(2):
        discriminator(generator(torch.randn(4, WIDTH))).mean().backward()
        assert generator.weight.grad is not None
        assert all(each.grad is None for each in discriminator.parameters())
        for mine, theirs in zip(
            discriminator.parameters(), other.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)
    assert losses(run) == losses(run_of(other, optimizer="sgd"))
