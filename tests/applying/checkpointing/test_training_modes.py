"""Which modules are in training mode: kept or set once, and said."""

import warnings

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.applying.checkpointing.apply_segments import apply_segments
from budgetfit.applying.run.run import Run
from budgetfit.applying.training_modes import mode_notes
from budgetfit.core.recipe import Recipe, Segment
from tests.applying.small_models import CHAIN, batch_for, make
from tests.models import mean
from tests.training_loops.treatments import TREATMENTS

RECIPE = Recipe(batch_size=4, precision="fp32", optimizer="sgd")


class Frozen(nn.Module):
    """A network whose first batch norm is to stay as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.layer = nn.Linear(8, 8)
        self.first.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.layer(self.first(x))).square().mean()


def training_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if module.training}


def test_a_model_in_evaluation_mode_trains_as_a_whole_and_goes_back() -> None:
    model = make("gpt2").eval()
    assert mode_notes(model) == ()
    with Run(model, RECIPE) as run:
        run.step(batch_for("gpt2"))
        assert all(module.training for module in model.modules())
    assert not training_names(model)


class Merging(nn.Linear):
    """Adds to its weight in ``eval()`` and takes it out in ``train()``, as loralib."""

    merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if mode == self.merged:
            self.weight.data += -1 if mode else 1
            self.merged = not mode
        return self


def test_modules_are_told_of_their_mode_by_train() -> None:
    model = nn.Sequential(Merging(8, 8), Merging(8, 8)).eval()
    with Run(model, RECIPE, loss=mean) as run:
        for _ in range(2):
            assert not any(layer.merged for layer in model) or not model.training
            run.step(torch.randn(4, 8))
            assert not any(layer.merged for layer in model)
            model.eval()
    assert all(layer.merged for layer in model)


def test_frozen_batch_norm_stays_frozen_after_an_evaluation() -> None:
    model = Frozen()
    (note,) = mode_notes(model)
    assert note.startswith("1 BatchNorm1d")
    with Run(model, RECIPE) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            run.step(torch.randn(4, 8))
            model.eval()
        run.step(torch.randn(4, 8))
        assert training_names(model) == {"", "second", "layer"}
    assert not model.first.running_mean.any()
    assert model.second.num_batches_tracked == 3


def test_who_thaws_it_is_told_once() -> None:
    model = Frozen()
    with Run(model, RECIPE) as run:
        model.train()
        with pytest.warns(UserWarning, match="1 BatchNorm1d were in evaluation mode"):
            run.step(torch.randn(4, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.step(torch.randn(4, 8))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft in transformers
@pytest.mark.parametrize("method", [None, "lora"])
def test_the_base_of_new_adapters_trains_as_from_pretrained_leaves_it(
    method: str | None,
) -> None:
    peft = pytest.importorskip("peft")
    base = make("gpt2").eval()
    model = (
        base
        if method
        else peft.get_peft_model(base, peft.LoraConfig(fan_in_fan_out=True))
    )

    def planned() -> budgetfit.Plan:
        return budgetfit.plan(
            model,
            gpu="t4",
            batch=batch_for("gpt2"),
            batch_size=4,
            precision="fp32",
            checkpointing="none",
            method=method,
        )

    plan = planned()
    assert not any("evaluation mode" in note for note in plan.warnings)
    kept_bytes = plan.estimate.allocated_bytes
    with budgetfit.apply(plan, model) as run:
        dropouts = [m for m in run.model.modules() if isinstance(m, nn.Dropout)]
        run.step(batch_for("gpt2"))
        assert dropouts
        assert all(module.training for module in dropouts)
        run.model.eval()
        run.step(batch_for("gpt2"))
        assert all(module.training for module in dropouts)
    model.train()
    assert planned().estimate.allocated_bytes == kept_bytes
    assert CHAIN["gpt2"][0] in dict(base.named_modules())


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", ["stack", "gpt2"])
def test_blocks_run_again_in_the_mode_of_their_forward(
    name: str, before: bool, treatment: str
) -> None:
    """An evaluation between forward and backward, or a forward in evaluation mode."""

    def gradients(segments: tuple[Segment, ...]) -> list[torch.Tensor]:
        model = make(name).train(before)
        apply_segments(model, segments)
        torch.manual_seed(5)
        found = model(**batch_for(name))
        model.train(not before)
        (found if name == "stack" else found.loss).backward()
        assert {module.training for module in model.modules()} == {not before}
        return [p.grad for p in model.parameters() if p.grad is not None]

    pairs = zip(
        gradients(tuple(TREATMENTS[treatment](CHAIN[name]))), gradients(()), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)
