import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import Plan, Verification
from budgetfit.applying.run.run import Run
from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.measuring.build_verification import build_verification
from budgetfit.measuring.compare_gradients import (
    GradientCheck,
    check_gradients,
    relative_errors,
)
from budgetfit.measuring.real_step import MeasuredPhase, RealSteps
from tests.applying.small_models import CHAIN, MAKERS, batch_for, make
from tests.reporting.sample_plans import (
    sample_estimate,
    sample_plan,
    sample_recipe,
    singles,
)
from tests.stateful_losses import LOSSES, Loss, RunningMean


def compare(
    name: str, recipe: Recipe, model: nn.Module | None = None, **options: Any
) -> GradientCheck:
    model = model if model is not None else make(name)

    def maker(chosen: Recipe, **more: Any) -> Callable[..., Run]:
        return lambda on_phase: Run(model, chosen, on_phase=on_phase, **more)

    return check_gradients(
        model,
        maker(recipe, **options),
        maker(replace(recipe, segments=())),
        batch_for(name),
        blocks=CHAIN[name],
    )


def segments(name: str) -> tuple[Segment, ...]:
    chain = CHAIN[name]
    return (Segment(chain[:1]), Segment(chain[2:5]))


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
@pytest.mark.parametrize("name", MAKERS)
def test_planned_gradients_are_the_plain_models(name: str, precision: str) -> None:
    recipe = Recipe(batch_size=4, precision=precision, segments=segments(name))
    found = compare(name, recipe)
    assert found.match
    assert found.max_error == 0.0
    assert found.recomputed_blocks == 4


class LooksAway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        used = self.blocks[1](self.blocks[0](x))
        return {"loss": used.mean(), "unused": self.blocks[2](used)}


def test_a_block_that_the_loss_does_not_need_counts_as_planned() -> None:
    model = LooksAway()
    names = [f"blocks.{number}" for number in range(3)]
    recipe = Recipe(batch_size=2, segments=tuple(Segment((name,)) for name in names))

    def maker(chosen: Recipe) -> Callable[..., Run]:
        return lambda on_phase: Run(model, chosen, on_phase=on_phase)

    found = check_gradients(
        model,
        maker(recipe),
        maker(replace(recipe, segments=())),
        torch.ones(2, 4),
        blocks=names,
        planned=names,
    )
    assert found.match
    assert found.recomputed_blocks == 3


def test_a_plan_that_changes_gradients_is_found_out() -> None:
    # The planted fault: dropout's generator is not kept.
    recipe = Recipe(batch_size=4, segments=segments("stack"))
    found = compare("stack", recipe, random_blocks=(), determinism_check="default")
    assert found.match is False
    assert found.max_error > 0.01
    assert found.parameter.startswith("layers.")
    assert found.noise == 0.0


def test_a_run_that_refuses_to_go_on_is_no_match() -> None:
    recipe = Recipe(batch_size=4, segments=segments("stack"))
    found = compare("stack", recipe, random_blocks=())
    assert found.match is False
    assert found.refusal.startswith("Block 'layers.")


def test_comparing_changes_neither_weights_nor_generators_nor_forwards() -> None:
    model = make("stack")
    before = {name: item.clone() for name, item in model.state_dict().items()}
    inside = [dict(item.__dict__) for item in model.modules()]
    generator = torch.get_rng_state()
    compare("stack", Recipe(batch_size=4, segments=segments("stack")), model)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [dict(item.__dict__) for item in model.modules()] == inside
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(item.grad is None for item in model.parameters())


def test_noise_of_the_plain_model_is_forgiven_and_more_is_not() -> None:
    check = GradientCheck(
        max_error=2e-4, parameter="w", noise=1e-4, recomputed_blocks=0
    )
    assert check.match
    assert replace(check, noise=1e-6).match is False
    # what nobody can tell from noise is neither right nor wrong
    assert replace(check, max_error=0.24, noise=0.2).match is None
    assert replace(check, max_error=0.0, noise=0.2).match is None
    assert replace(check, max_error=INF, noise=0.2).match is False
    assert replace(check, max_error=1e-5, noise=0.0).match


class RoundedKey(nn.Module):
    """A bias that the loss does not depend on but for rounding, as a key's in BERT."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(8))
        self.size = size
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.bias.register_hook(self.rounding)
        return x.square().mean() + 0.0 * self.bias.sum()

    def rounding(self, grad: torch.Tensor) -> torch.Tensor:
        return self.size * torch.randn(grad.shape, generator=self.generator)


@pytest.mark.parametrize(("size", "match"), [(1e-9, True), (1.0, None)])
def test_noise_that_is_nearly_nothing_hides_no_other_gradient(
    size: float, *, match: bool | None
) -> None:
    model = RoundedKey(size)
    names = [f"layers.{number}" for number in range(3)]
    planned = Recipe(batch_size=2, segments=(Segment((names[1],)),))

    def maker(recipe: Recipe) -> Callable[..., Run]:
        return lambda on_phase: Run(model, recipe, on_phase=on_phase)

    found = check_gradients(
        model,
        maker(planned),
        maker(replace(planned, segments=())),
        torch.randn(2, 8, generator=torch.Generator().manual_seed(0)),
        blocks=names,
    )
    assert found.match is match
    assert found.left_out == (("bias",) if match else ())
    assert found.noise == pytest.approx(0.0 if match else 1.4, abs=0.5)


def tanh_plan(loss: Loss) -> tuple[Plan, nn.Module]:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    )
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    plan = budgetfit.plan(
        model,
        gpu="t4",
        batch=batch,
        loss=loss,
        precision="fp32",
        checkpointing="full",
        batch_size=4,
        effective_batch_size=4,
    )
    return plan, model


def test_verify_restores_the_modules_of_the_loss() -> None:
    loss = RunningMean()
    plan, model = tanh_plan(loss)
    check = budgetfit.verify(plan, model, loss=loss, device="cpu")
    assert check.gradients_match
    assert not loss.center.any()


@pytest.mark.parametrize("name", LOSSES)
def test_verify_restores_what_a_loss_holds(name: str) -> None:
    torch.manual_seed(0)
    loss = LOSSES[name]()
    plan, model = tanh_plan(loss)
    outputs = torch.ones(2, 4, requires_grad=True)
    torch.manual_seed(0)
    expected = LOSSES[name]()(outputs, None)
    if name == "global":
        LOSSES[name]()  # none seen

    check = budgetfit.verify(plan, model, loss=loss, device="cpu")

    assert check.gradients_match
    assert loss(outputs, None) == expected


def test_gradients_that_are_all_nan_show_nothing() -> None:
    loss = RunningMean()
    plan, model = tanh_plan(loss)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    check = budgetfit.verify(plan, model, loss=loss, device="cpu")
    assert not check.passed
    assert check.gradients_match is None
    assert "NOT CHECKED: no gradient of the unmodified model is finite" in str(check)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("planned", "plain", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),  # 0.5 over the norm 5
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], INF),
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 4.5], [NAN, 5.0], 0.1),
        ([NAN], [1.0], INF),
        (None, [1.0], INF),
        ([1.0], None, INF),
        (None, None, 0.0),
    ],
)
def test_errors_are_relative_to_the_plain_models_norm(
    planned: list[float] | None, plain: list[float] | None, error: float
) -> None:
    def tensor(values: list[float] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values)

    same = torch.ones(2)
    found = relative_errors(
        [("same", same), ("w", tensor(planned))], {"same": same, "w": tensor(plain)}
    )
    assert found == {"same": 0.0, "w": pytest.approx(error)}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_errors_of_complex_gradients_count_both_parts(dtype: torch.dtype) -> None:
    plain = torch.tensor([3 + 4j, 0], dtype=dtype)
    for planned, error in ((plain, 0.0), (plain.conj(), 1.6), (plain.real, 0.8)):
        found = relative_errors([("w", planned.to(dtype))], {"w": plain})
        assert found["w"] == pytest.approx(error)


def point(step: int, phase: str, peak: int, micro_step: int = 0) -> TimelinePoint:
    return TimelinePoint(
        step=step,
        micro_step=micro_step,
        phase=phase,
        block="",
        allocated_bytes=peak,
        reserved_bytes=2 * peak,
    )


TIMELINE = MemoryTimeline(
    points=(
        point(-1, "setup", 1),
        point(0, "forward", 10),
        point(0, "forward", 30),
        point(0, "forward", 20, micro_step=1),
        point(1, "forward", 50),
    ),
    allocated_bytes=50,
    reserved_bytes=100,
    at_peak_bytes={"parameters": 50},
)

MEASURED = RealSteps(
    device="cuda",
    device_name="A card",
    steps=3,
    phases=tuple(
        MeasuredPhase(
            step=step, phase="forward", allocated_bytes=40 + step, reserved_bytes=90
        )
        for step in range(3)
    ),
    process_bytes=500,
    step_ms=(9.0, 1.0, 2.0),
    notes=("a note",),
)


def plan_that_recomputes(blocks: int) -> Plan:
    recipe = sample_recipe(segments=singles(range(blocks)))
    return sample_plan(estimate=sample_estimate(recipe, process_bytes=480, step_ms=1.5))


def test_prediction_and_measurement_stand_side_by_side() -> None:
    check = build_verification(
        MEASURED,
        plan_that_recomputes(4),
        TIMELINE,
        GradientCheck(max_error=1e-7, parameter="w", noise=0.0, recomputed_blocks=4),
        ("another",),
    )
    rows = [
        (row.predicted_allocated_bytes, row.measured_allocated_bytes)
        for row in check.phases
    ]
    # The largest stretch of the phase; the third step is like the last predicted one.
    assert rows == [(30, 40), (50, 41), (50, 42)]
    assert [row.predicted_reserved_bytes for row in check.phases] == [60, 100, 100]
    # the first step is told apart; of the others the median
    assert (check.first_step_ms, check.step_ms) == (9.0, 1.5)
    assert (check.predicted_process_bytes, check.measured_process_bytes) == (480, 500)
    assert check.passed
    assert check.notes == ("a note", "another")


def compared_with_itself(model: nn.Module) -> GradientCheck:
    def maker(on_phase: Callable[[str], None]) -> Run:
        return Run(model, Recipe(batch_size=2), on_phase=on_phase)

    return check_gradients(model, maker, maker, torch.ones(2, 8), blocks=())


class SeedInState(nn.Module):
    """Draws from a seed of its own, as Keras's seeded dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("seed", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(self.seed))
        self.seed += 1
        return (self.inner(x) * torch.rand(x.shape, generator=generator)).sum()


def test_runs_are_compared_from_one_state() -> None:
    # else each run draws other numbers, and that noise would excuse any plan
    found = compared_with_itself(SeedInState())
    assert (found.noise, found.max_error) == (0.0, 0.0)


class NoisyNow(nn.Module):
    """Gradients of the forwards with these numbers differ a little, as by atomics."""

    def __init__(self, *noisy: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.noisy, self.count = noisy, iter(range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.001 if next(self.count) in self.noisy else 1.0
        return self.inner(x).sum() * scale


@pytest.mark.parametrize(
    ("noisy", "match"),
    [
        ((2,), False),  # the plan alone
        ((2, 3), True),  # the unmodified model too, when it runs again
        ((2, 5), True),
        ((2, 6), False),  # by then it runs no more
    ],
)
def test_where_gradients_differ_the_noise_is_measured_again(
    noisy: tuple[int, ...], match: bool
) -> None:
    found = compared_with_itself(NoisyNow(*noisy))
    assert found.match is match
    assert found.max_error == pytest.approx(1e-3, rel=0.01)


def without_a_comparison(measured: RealSteps, blocks: int) -> Verification:
    return build_verification(measured, plan_that_recomputes(blocks), TIMELINE, None)


def test_a_plan_whose_unmodified_model_is_too_large_does_not_fail_for_it() -> None:
    check = without_a_comparison(MEASURED, 4)
    assert check.recomputed_as_planned is None
    assert check.passed
    text = str(check)
    assert "gradients: not compared" in text
    assert "recomputed blocks: not watched, 4 are planned" in text


def test_without_a_comparison_gradients_are_unknown() -> None:
    ended = replace(
        MEASURED, phases=(), step_ms=(), out_of_memory="CUDA out of memory."
    )
    check = without_a_comparison(ended, 0)
    assert check.gradients_match is None
    assert check.max_gradient_error is None
    assert check.step_ms == 0.0
    assert not check.passed
