"""What a user mistypes is one clear sentence, before anything is traced or changed."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import InputError, Plan, Recipe, Segment, TraceError
from budgetfit.gpus.table import find_gpu
from budgetfit.inputs.arguments import Arguments, optimizer_name
from budgetfit.inputs.target_gpu import find_target_gpu
from tests.api.planned import CARD, Fingerprint

without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CUDA device of this machine is the default"
)
SIZE = "is not a memory size. Write a number above zero and a unit, for example"


class Net(nn.Module):
    """Three blocks and a head; its forward takes x and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


NET = Net()
X = torch.zeros(4, 8)


def plan(**options: Any) -> budgetfit.Plan:
    settings: dict[str, Any] = {"gpu": "t4", "batch": X, "batch_size": 4, **options}
    return budgetfit.plan(settings.pop("model", NET), **settings)


def test_numbers_of_numpy_and_torch_plan_as_pythons_own() -> None:
    usual = plan(vram=2**33, batch_size=2, effective_batch_size=4, headroom=2**28)
    found = plan(
        vram=np.int64(2**33),
        batch_size=np.int64(2),
        effective_batch_size=torch.tensor(4),
        headroom=np.uint64(2**28),
    )
    assert found.recipe == usual.recipe
    assert found.budget == usual.budget
    asked = found.provenance["asked"]
    assert Plan.from_json(found.to_json()).provenance["asked"] == asked
    assert found.hours(np.int64(1000)) == usual.hours(1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vram": "24"}, SIZE),
        ({"vram": 0}, SIZE),
        ({"vram": -1}, SIZE),
        ({"vram": True}, SIZE),
        ({"vram": 24.5}, SIZE),
        ({"vram": "24Gb"}, "could mean bits"),
        ({"vram": "100MB"}, "leave nothing to plan with"),
        ({"vram": 24}, "24 B leave nothing to plan with"),
        ({"vram": 2**70}, "is more memory than any machine has"),
        ({"vram": "rtx-4090", "gpu": None}, "is a card and no memory size: use gpu="),
        ({"vram": {"x": X}}, f"A dict {SIZE}"),
        ({"host_ram": -1}, SIZE),
        ({"headroom": "some"}, SIZE),
        ({"headroom": -1}, SIZE),
        ({"headroom": "20GB"}, "leave nothing to plan with"),
        ({"gpu": "rtx-4091"}, "not in the card table. Nearest: rtx-4090"),
        ({"gpu": 4090}, 'a name such as "rtx-4090", or a plan\'s gpu; got 4090'),
        ({"precision": "bf17"}, "'bf17' is not a precision. Use one of: auto, fp32"),
        ({"precision": None}, "None is not a precision"),
        ({"precision": []}, "list of precisions is empty"),
        ({"precision": ["fp32", "fp7"]}, "'fp7' is not a precision"),
        ({"precision": "bf16"}, "needs compute capability 8.0, and Tesla T4 has 7.5"),
        ({"precision": "tf32"}, 'Use precision="fp16-mixed"'),
        ({"optimizer": "adamx"}, "'adamx' is not an optimizer"),
        ({"optimizer": "lomo"}, "it runs the backward pass itself"),
        ({"optimizer": 3}, "must be a name such as 'adamw_torch_fused'"),
        ({"optimizer": lambda _: 3}, "returned int, which is no torch.optim.Optimizer"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"batch_size": 2.0}, "got 2.0"),
        ({"batch_size": True}, "got True"),
        ({"effective_batch_size": -8}, "effective_batch_size must be a whole number"),
        ({"effective_batch_size": 6}, "does not divide effective_batch_size 6"),
        (
            {"effective_batch_size": 8, "optimizer_in_backward": True},
            "batch_size=4 cannot accumulate to effective_batch_size=8",
        ),
        ({"max_length": 0}, "max_length must be a whole number of at least 1"),
        ({"max_length": True}, "got True"),
        ({"max_length": 64}, "changes nothing in a batch that is given"),
        (
            {"checkpointing": "some"},
            "not a checkpointing policy. Use one of: auto, none",
        ),
        ({"checkpointing": None}, "must be auto, none, full, every-2, sqrt"),
        ({"checkpointing": ["layers.9"]}, "Its blocks: layers.0, layers.1, layers.2"),
        ({"objective": "speed"}, "Use one of: throughput, batch_size, memory"),
        ({"loss": "mse"}, "loss must be a function: loss(outputs, batch) -> scalar"),
        (
            {"loss": lambda out, _: out},
            "must be a scalar tensor, got a tensor of shape",
        ),
        ({"loss": lambda *_: None}, "must be a scalar tensor, got NoneType"),
        ({"loss": lambda out, _: out.detach().mean()}, "nothing would train"),
        ({"batch": {}}, 'for example batch={"input_ids":'),
        ({"batch": "x"}, "a batch holds tensors"),
        ({"batch": torch.zeros(0, 8)}, "The batch is empty"),
        ({"batch": {"x": [1.0, 2.0]}}, "tensors"),
        ({"model": Net}, "make one: Net(...)"),
        ({"model": None}, "A model is expected, not a NoneType"),
        ({"model": ""}, "not empty text"),
        ({"model": nn.Identity()}, "no trainable parameter"),
    ],
)
def test_plan_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("fp32", "recipe must be a Recipe, not a str"),
        ({"batch_size": 4}, "budgetfit.Recipe(batch_size=8"),
        (Recipe(batch_size=2, precision="fp7"), "'fp7' is not a precision"),
        (Recipe(batch_size=2, optimizer="adamx"), "'adamx' is not an optimizer"),
        (
            Recipe(batch_size=2, segments=(Segment(("layers.9",)),)),
            "has no block 'layers.9'",
        ),
        (Recipe(batch_size=2, loss_chunks=2), "loss_chunks cuts the output head"),
    ],
)
def test_estimate_refuses(recipe: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        budgetfit.estimate(NET, recipe, gpu="t4", batch=X)
    assert message in str(caught.value)


def test_a_module_whose_input_cannot_be_guessed_says_how_to_pass_a_batch() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    with pytest.raises(InputError, match=r"No batch can be made for Odd.*batch=torch"):
        plan(model=Odd(), batch=None)
    assert plan(model=Odd(), batch=torch.zeros(2, 3)).fits


@pytest.mark.parametrize(
    ("options", "message", "advice"),
    [
        ({"batch": {"y": X}}, "unexpected keyword argument 'y'", "batch="),
        (
            {"loss": lambda _, __: 1 / 0},
            "ZeroDivisionError",
            "loss(outputs, batch) gets what the model returns",
        ),
        (
            {"loss": lambda _: None},
            "takes 1 positional argument but 2 were given",
            "loss=",
        ),
    ],
)
def test_what_fails_inside_the_model_or_the_loss_is_a_trace_error(
    options: dict[str, Any], message: str, advice: str
) -> None:
    with pytest.raises(TraceError) as caught:
        plan(**options)
    assert message in str(caught.value)
    assert "Net cannot run on fake tensors" in str(caught.value)
    assert advice in str(caught.value)


def test_a_trace_error_names_the_module_and_the_op(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TraceError, match=r"in 'layers\.0\.0' at aten\.mm") as caught:
        plan(batch=torch.zeros(4, 9))
    assert caught.value.module == "layers.0.0"
    assert caught.value.op == "aten.mm.default"
    # torch logs a traceback of its own for every op that a fake tensor refuses
    assert not caplog.records
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "options", [{"batch": torch.zeros(4, 9)}, {"optimizer": "adamx"}, {"vram": "1"}]
)
def test_after_an_error_the_model_is_as_it_was(options: dict[str, Any]) -> None:
    model = Net()
    before = Fingerprint.of(model)
    with pytest.raises(budgetfit.BudgetfitError):
        plan(model=model, **options)
    Fingerprint.of(model).assert_equal(before)


@without_cuda
def test_without_card_and_limit_it_asks_for_one() -> None:
    with pytest.raises(InputError, match=r'vram="24GB" or gpu="rtx-4090"'):
        find_target_gpu(None, None)


@without_cuda
def test_a_limit_alone_stands_for_a_card_that_is_named_in_a_note() -> None:
    card = find_target_gpu("24GB", None)
    assert card.total_bytes == 24 * 10**9
    (note,) = card.notes
    assert card.gpu.title in note
    assert "gpu=" in note


def test_a_card_alone_brings_its_own_memory() -> None:
    card = find_target_gpu(None, "RTX 4090")
    assert card.gpu == find_gpu(CARD)
    assert card.budget(0).total_bytes == find_gpu(CARD).total_bytes
    assert card.notes == ()


def test_with_both_the_card_is_limited() -> None:
    card = find_target_gpu("8GiB", CARD)
    assert card.budget(0).total_bytes == 8 * 2**30
    assert card.budget("0") == card.budget("0MB") == card.budget(0)
    assert card.budget(0, host_ram="0 GiB").host_ram_bytes == 0
    assert card.budget("1GiB").headroom_bytes == 2**30
    assert card.budget(None).headroom_bytes == 128 * 2**20


def test_names_of_optimizers_are_kept_and_functions_named() -> None:
    assert optimizer_name("sgd") == "sgd"
    assert optimizer_name(torch.optim.SGD) == "torch.optim.sgd.SGD"
    partial = functools.partial(torch.optim.SGD, lr=0.1)
    assert optimizer_name(partial) == "torch.optim.sgd.SGD"


def test_a_policy_stays_a_word_and_names_become_a_tuple() -> None:
    def parsed(checkpointing: Any) -> object:
        asked = Arguments(model=NET, gpu="t4", batch=X, checkpointing=checkpointing)
        return asked.parsed().checkpointing

    assert parsed("sqrt") == "sqrt"
    assert parsed(["layers.0"]) == ("layers.0",)
