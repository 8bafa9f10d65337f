import copy
import inspect
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES
from budgetfit.applying.run.run import Run
from budgetfit.core.precision import PRECISIONS
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError
from budgetfit.utils.function_name import qualified_name
from tests.applying.optimizers.optimizer_states import READ_VALUES
from tests.applying.ranks.live_bytes import LiveBytes
from tests.applying.small_models import CHAIN, MAKERS, Stack, batch_for, make
from tests.models import sgd, still

# A GradScaler asks for values, which fake tensors do not have.
NO_ITEM = [name for name in PRECISIONS if not PRECISIONS[name].grad_scaler]
# Every model, and every precision.
COMBINATIONS = [
    *((name, "bf16-mixed") for name in MAKERS),
    *(("gpt2", name) for name in PRECISIONS if name != "bf16-mixed"),
]
PAIRS = (Segment(("layers.0", "layers.1")), Segment(("layers.3",)))


def recipe(batch_size: int = 4, steps: int = 1, **options: Any) -> Recipe:
    return Recipe(
        batch_size=batch_size,
        gradient_accumulation_steps=steps,
        **{"optimizer": qualified_name(sgd), **options},
    )


def run_stack(settings: Recipe, **options: Any) -> Run:
    return Run(make("stack"), settings, optimizer=sgd, **options)


def gentle(run: Run) -> Run:
    """Start with a loss scale that does not overflow, so that no step is left out."""
    if run.scaler is not None:
        run.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return run


def parts(batch: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    count = len(next(iter(batch.values())))
    return [
        {name: value[start : start + size] for name, value in batch.items()}
        for start in range(0, count, size)
    ]


def close(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, a), (_, b) in zip(
        one.named_parameters(), other.named_parameters(), strict=True
    ):
        assert (a - b).norm() <= tolerance * b.norm(), name


def state(model: nn.Module) -> list[Any]:
    """Everything that an undo has to give back, by identity."""
    return [
        (
            dict(module.__dict__),
            [
                (id(item), item.dtype, item.requires_grad)
                for item in module.parameters()
            ],
            [(id(item), item.dtype) for item in module.buffers()],
            str(inspect.signature(module.forward)),
        )
        for module in model.modules()
    ]


@pytest.mark.parametrize(
    # In fp16, a third and a quarter of the loss round differently.
    ("precision", "tolerance"),
    [("fp32", 1e-5), ("fp16-mixed", 1e-3)],
)
def test_a_ragged_last_group_divides_by_the_micro_batches_that_came(
    precision: str, tolerance: float
) -> None:
    batch = batch_for("stack", samples=12)
    options: dict[str, Any] = {"optimizer": sgd}
    small = Run(still(make("stack")), recipe(4, 4, precision=precision), **options)
    three = Run(still(make("stack")), recipe(4, 3, precision=precision), **options)
    gentle(small)
    gentle(three)
    before = next(small.model.parameters()).clone()
    for part in parts(batch, 4):
        small.step(part)
        three.step(part)
    assert small.flush()
    assert not small.flush()
    moved = (next(small.model.parameters()) - before).norm() / before.norm()
    assert moved > 4 * tolerance
    close(small.model, three.model, tolerance)


def test_weights_change_on_every_nth_call_alone() -> None:
    run = run_stack(recipe(4, 3))
    weight = next(run.model.parameters())
    seen = []
    for _ in range(6):
        before = weight.clone()
        run.step(batch_for("stack"))
        seen.append(not torch.equal(weight, before))
    assert seen == [False, False, True, False, False, True]


def test_phases_are_announced_as_they_begin() -> None:
    phases: list[str] = []
    run = run_stack(recipe(4, 2), on_phase=phases.append)
    run.step(batch_for("stack"))
    run.step(batch_for("stack"))
    once = ["forward", "backward"]
    assert phases == [*once, *once, "optimizer"]


def test_gradients_are_clipped_to_the_norm_after_unscaling() -> None:
    # SGD at 0.1: the whole step has norm 0.1 x 0.5, whatever the loss scale is.
    for precision in ("fp32", "fp16-mixed"):
        run = gentle(run_stack(recipe(precision=precision)))
        before = [item.detach().clone() for item in run.model.parameters()]
        run.step(batch_for("stack"), max_grad_norm=0.5)
        after = list(run.model.parameters())
        moved = torch.cat(
            [(a - b).flatten() for a, b in zip(after, before, strict=True)]
        )
        assert moved.norm().item() == pytest.approx(0.05, rel=1e-4)


def test_outputs_and_graph_do_not_outlive_the_forward_and_backward() -> None:
    alive: dict[str, weakref.ref[Any]] = {}
    at_phase: dict[str, bool] = {}

    def loss(outputs: torch.Tensor, batch: object) -> torch.Tensor:
        del batch
        alive["outputs"] = weakref.ref(outputs)
        return outputs.sum()  # saves nothing of its input

    def note(phase: str) -> None:
        if alive:
            at_phase[phase] = alive["outputs"]() is not None

    model = nn.Sequential(nn.Linear(4, 4))
    with LiveBytes() as meter:
        run = Run(model, recipe(), loss=loss, optimizer=sgd, on_phase=note)
        batch = torch.ones(2, 4)
        before = meter.live_bytes
        reported = run.step(batch)
        assert meter.live_bytes == before + 4  # the loss itself
    assert at_phase == {"backward": False, "optimizer": False}
    assert not reported.requires_grad


@pytest.mark.parametrize(("name", "precision"), COMBINATIONS)
def test_planned_training_equals_plain_training_bit_for_bit(
    name: str, precision: str
) -> None:
    chain = CHAIN[name]
    segments = (Segment(chain[:1]), Segment(chain[1:4]))
    models = []
    for chosen in ((), segments):
        settings = Recipe(batch_size=4, precision=precision, segments=chosen)
        run = gentle(Run(make(name), settings))
        torch.manual_seed(5)
        before = [item.detach().clone() for item in run.model.parameters()]
        for _ in range(2):
            run.step(batch_for(name))
        assert not all(map(torch.equal, before, run.model.parameters()))
        models.append(run.model)
    plain, planned = models
    for (key, a), b in zip(plain.named_parameters(), planned.parameters(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize(("name", "precision"), COMBINATIONS)
def test_undo_gives_the_plain_model_back_with_trained_values(
    name: str, precision: str
) -> None:
    model = make(name)
    model.eval()
    before = state(model)
    with Run(
        model,
        Recipe(
            batch_size=4,
            precision=precision,
            segments=(Segment(CHAIN[name][:1]), Segment(CHAIN[name][2:4])),
        ),
    ) as run:
        run.step(batch_for(name))
        assert model.training
        trained = {key: item.clone() for key, item in model.named_parameters()}
    assert state(model) == before
    for key, item in model.named_parameters():
        assert torch.equal(item, trained[key].to(item.dtype))


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": "adamw_torhc"},
        {"segments": (Segment(("layers.0",)), Segment(("nowhere",)))},
        {"precision": "fp64"},
    ],
)
def test_a_recipe_that_cannot_be_applied_leaves_the_model_as_it_was(
    wrong: dict[str, Any],
) -> None:
    model = make("stack").eval()
    before = state(model)
    settings = Recipe(**{"batch_size": 1, "precision": "bf16", **wrong})
    with pytest.raises(InputError):
        Run(model, settings)
    assert state(model) == before


def failing(at: str) -> Callable[[str], None]:
    def note(phase: str) -> None:
        if phase == at:
            raise KeyboardInterrupt

    return note


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
@pytest.mark.parametrize("at", ["forward", "backward", "optimizer"])
def test_an_error_in_the_middle_leaves_weights_and_states_as_before(
    at: str, precision: str
) -> None:
    run = run_stack(recipe(4, 2, precision=precision, segments=PAIRS))
    copied = run_stack(recipe(4, 2, precision=precision, segments=PAIRS))
    batch = batch_for("stack")
    torch.manual_seed(0)
    run.step(batch)
    run._on_phase = failing(at)
    with pytest.raises(KeyboardInterrupt):
        run.step(batch)
    assert all(item.grad is None for item in run.model.parameters())
    run._on_phase = print
    for each in (run, copied):
        torch.manual_seed(1)
        each.step(batch)
        each.step(batch)
    close(run.model, copied.model)


def test_an_error_in_a_flush_drops_the_group() -> None:
    run = run_stack(recipe(4, 2))
    run.step(batch_for("stack"))
    run._on_phase = failing("optimizer")
    with pytest.raises(KeyboardInterrupt):
        run.flush()
    assert all(item.grad is None for item in run.model.parameters())
    assert not run.flush()


def test_an_error_after_unscaling_leaves_the_scaler_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(make("stack"), Recipe(batch_size=4, precision="fp16-mixed"))
    batch = batch_for("stack")

    def out_of_memory(*_: object, **__: object) -> None:
        run.optimizer.state[run.trained[0]]["step"] = torch.zeros(())
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(run.optimizer, "step", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run.step(batch)
    assert not run.optimizer.state
    run.step(batch)
    assert len(run.optimizer.state) == len(run.trained)


def test_states_round_trip_with_the_scalers() -> None:
    settings = Recipe(batch_size=4, precision="fp16-mixed", segments=PAIRS)
    first = gentle(Run(make("stack"), settings))
    assert first.scaler is not None
    batch = batch_for("stack")
    first.step(batch)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert list(saved["model"]) == list(make("stack").state_dict())
    second = Run(make("stack"), settings)
    second.load_state_dict(saved)
    assert second.scaler is not None
    assert second.scaler.state_dict() == first.scaler.state_dict()
    assert second.scaler.get_scale() == 8.0
    for run in (first, second):
        torch.manual_seed(2)
        run.step(batch)
    close(first.model, second.model)


def test_what_is_no_state_is_refused() -> None:
    run = run_stack(recipe())
    with pytest.raises(InputError, match=r"\['optimizer', 'scaler'\] is missing"):
        run.load_state_dict({"model": {}})
    with pytest.raises(InputError, match="no state of a Run"):
        run.load_state_dict("run.pt")  # type: ignore[arg-type]


def test_an_evaluation_in_between_does_not_stop_the_checkpointing() -> None:
    run = Run(
        make("gpt2"), Recipe(batch_size=4, segments=(Segment(CHAIN["gpt2"][:1]),))
    )
    run.model.eval()
    with torch.no_grad(), run.autocast():
        run.model(**batch_for("gpt2"))
    run.step(batch_for("gpt2"))
    assert run.model.training


def test_submodules_kept_in_evaluation_mode_stay_in_it() -> None:
    model = make("stack")
    model.get_submodule("layers.2").eval()
    run = Run(model, recipe(), optimizer=sgd)
    run.step(batch_for("stack"))
    assert not model.get_submodule("layers.2").training


def test_gradients_from_before_do_not_join_the_first_step() -> None:
    runs = []
    for stale in (False, True):
        model = still(make("stack"))
        if stale:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        runs.append(Run(model, recipe(), optimizer=sgd))
        runs[-1].step(batch_for("stack"))
    close(runs[0].model, runs[1].model)


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(InputError, match="meta device: it has no weights"):
        Run(model, recipe(), optimizer=sgd)


def test_another_optimizer_than_the_recipes_is_refused() -> None:
    with pytest.raises(InputError, match=r"made for the optimizer 'adamw_torch_fused'"):
        Run(make("stack"), Recipe(batch_size=1), optimizer=sgd)
    with pytest.raises(InputError, match=r"sgd' is not an optimizer"):
        Run(make("stack"), recipe())


ODD = {"muon", *READ_VALUES}  # matrices only; values of fakes


@pytest.mark.parametrize(
    ("name", "precision", "optimizer"),
    [
        ("gpt2", "bf16-mixed", "adamw_torch_fused"),
        ("t5", "bf16", "adamw_torch"),
        ("vit", "fp32", "adamw_torch_fused"),
        *(("stack", precision, "adamw_torch") for precision in NO_ITEM),
        *(("sequential", "bf16", name) for name in sorted(set(OPTIMIZER_NAMES) - ODD)),
    ],
)
def test_the_same_step_runs_on_fake_tensors(
    name: str, precision: str, optimizer: str
) -> None:
    if optimizer.startswith("schedule_free"):
        pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    chain = CHAIN[name]
    settings = Recipe(
        batch_size=2,
        gradient_accumulation_steps=2,
        precision=precision,
        optimizer=optimizer,
        segments=(Segment(chain[:1]), Segment(chain[1:4])),
    )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        model, batch = copy.deepcopy((make(name), batch_for(name, 2)))
    with mode:
        run = Run(model, settings)
        with LiveBytes() as meter:
            kept = []
            for _ in range(3):
                run.step(batch, max_grad_norm=1.0)
                run.step(batch, max_grad_norm=1.0)
                kept.append(meter.live_bytes)
    assert kept[2] == kept[1] == kept[0]  # nothing outlives a step but the state
