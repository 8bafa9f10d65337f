import contextlib
import functools
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as torch_optimizer
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from budgetfit.applying.optimizers import bitsandbytes
from budgetfit.applying.optimizers.factory import (
    OPTIMIZER_NAMES,
    TORCH_ONLY,
    make_optimizer,
)
from budgetfit.applying.optimizers.flat_parts import refuse_if_by_shape
from budgetfit.errors import InputError
from budgetfit.utils.function_name import qualified_name
from tests.applying.optimizers.optimizer_states import LIBRARIES

TORCH_NAMES = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad")
TORCH_NAMES += ("rmsprop",)
Parameter = torch.nn.Parameter


TRAINER_NAMES = {each.value for each in OptimizerNames}


def parameters() -> list[Parameter]:
    return [Parameter(torch.ones(4, 4)), Parameter(torch.ones(4))]


def my_sgd(trained: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained, lr=0.5, momentum=0.9)


def test_every_name_of_transformers_is_planned_or_refused_with_a_reason() -> None:
    theirs = {each.value for each in OptimizerNames}
    refused = theirs - set(OPTIMIZER_NAMES)
    assert set(OPTIMIZER_NAMES) - theirs == {
        "adamw_torch_fp8",
        "adamw_torch_cpu_offload",
        *TORCH_ONLY,
    }
    for name in refused:
        with pytest.raises(InputError, match=r"cannot be planned: .{20}"):
            make_optimizer(name, parameters(), device_type="cpu")


@pytest.mark.parametrize("name", sorted(TRAINER_NAMES & set(OPTIMIZER_NAMES)))
def test_names_build_what_transformers_trainer_builds(name: str) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is missing")
    defaults = {item.name: item.default for item in fields(TrainingArguments)}
    arguments: Any = SimpleNamespace(**{**defaults, "optim": name})
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    expected = kind([{"params": parameters(), "weight_decay": 0.0}], **options)
    made: Any = make_optimizer(name, parameters(), device_type="cpu")
    if name.startswith("schedule_free"):
        expected.train()
    assert type(made) is type(expected)
    for setting in ("is_paged", "block_size", "bf16_stochastic_round"):
        assert getattr(made, setting, None) == getattr(expected, setting, None)
    if name in bitsandbytes.SPECS:
        assert vars(made.args) == vars(expected.args)
    ours, theirs = made.param_groups[0], expected.param_groups[0]
    assert {key: ours[key] for key in ours if key != "params"} == {
        key: theirs[key] for key in theirs if key != "params"
    }


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_every_name_trains(name: str) -> None:
    trained = parameters()
    optimizer = make_optimizer(name, trained, lr=0.1, device_type="cpu")
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all((parameter < 1).all() for parameter in trained)


@pytest.mark.parametrize(
    ("name", "foreach", "fused"),
    [
        ("adamw_torch", True, None),
        ("adamw_torch_fused", None, True),
        ("sgd", True, None),
        ("adagrad", True, None),
        ("rmsprop", True, None),
    ],
)
def test_on_cuda_the_choice_is_said_of_fakes_that_stand_for_it_too(
    name: str, foreach: bool | None, fused: bool | None
) -> None:
    with FakeTensorMode():
        fakes = parameters()
    for made in (
        make_optimizer(name, parameters(), device_type="cuda"),
        make_optimizer(name, fakes, device_type="cuda"),
    ):
        group = made.param_groups[0]
        assert (group["foreach"], group.get("fused")) == (foreach, fused)
    for made in (
        make_optimizer(name, parameters(), device_type="cpu"),
        make_optimizer(name, fakes, device_type="cpu"),
    ):
        assert made.param_groups[0]["foreach"] is None


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD]
)
def test_said_choices_are_those_that_torch_would_make(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch's own rule, told that CPU tensors are on a device that has foreach.
    monkeypatch.setattr(
        torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]
    )
    choice = torch_optimizer._default_to_fused_or_foreach(
        parameters(), differentiable=False, use_fused=False
    )
    made = make_optimizer(kind, parameters(), device_type="cuda")
    assert choice == (False, made.param_groups[0]["foreach"])


def test_callables_keep_their_own_choices() -> None:
    loop = functools.partial(torch.optim.AdamW, foreach=False)
    adafactor = torch.optim.Adafactor  # torch's default here is the loop
    assert not make_optimizer(loop, parameters(), device_type="cuda").param_groups[0][
        "foreach"
    ]
    made = make_optimizer(adafactor, parameters(), device_type="cuda")
    assert made.param_groups[0]["foreach"] is None


@pytest.mark.parametrize(
    ("make", "foreach"),
    [
        (torch.optim.AdamW, None),  # torch's Adam refuses it with foreach=True
        (functools.partial(torch.optim.AdamW, capturable=True), True),
        (torch.optim.SGD, True),
    ],
)
def test_a_rate_may_be_a_tensor(make: Any, foreach: bool | None) -> None:
    rate = functools.partial(make, lr=torch.tensor(0.1))
    made = make_optimizer(rate, parameters(), device_type="cuda")
    assert made.param_groups[0]["foreach"] is foreach


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_refused() -> None:
    frozen = Parameter(torch.ones(2), requires_grad=False)
    made = make_optimizer(my_sgd, [*parameters(), frozen], device_type="cpu")
    assert len(made.param_groups[0]["params"]) == 2
    with pytest.raises(InputError, match="no trainable parameter"):
        make_optimizer("sgd", [frozen], device_type="cpu")


class NormOfWeight(torch.optim.SGD):
    """As LAMB and LARS: a step as long as the weight."""

    def step(self, _: None = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            length = 0.1 * float(weight.data.norm() / weight.grad.norm())
            weight.data.add_(weight.grad, alpha=-length)


@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [
        (torch.optim.AdamW, False),
        (torch.optim.Rprop, False),
        (functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True), False),
        (torch.optim.Adafactor, True),  # means of rows and columns
        (torch.optim.Muon, True),  # takes matrices alone
        (NormOfWeight, True),
    ],
)
def test_deepspeeds_flat_parts_are_trained_as_their_weights_or_refused(
    kind: Any, is_refused: bool
) -> None:
    state = torch.get_rng_state()
    refused = pytest.raises(InputError, match="and own trains a matrix by more")
    with refused if is_refused else contextlib.nullcontext(), FakeTensorMode():
        refuse_if_by_shape(kind, "own")
    assert torch.equal(torch.get_rng_state(), state)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"Did you mean 'adamw_torch'.*sgd"):
        make_optimizer("adamw_torhc", parameters(), device_type="cpu")
    usual = r"Did you mean 'adamw_torch_fused' or 'adamw_torch'\?"
    for name in ("adamw", "AdamW", "adamww"):
        with pytest.raises(InputError, match=usual):
            make_optimizer(name, parameters(), device_type="cpu")
    with pytest.raises(InputError, match="5 is not an optimizer"):
        make_optimizer(5, parameters(), device_type="cpu")  # type: ignore[arg-type]


def test_refusals_say_what_to_do_instead() -> None:
    with pytest.raises(InputError, match=r"'lomo' cannot be planned: .*in_backward=Tr"):
        make_optimizer("lomo", parameters(), device_type="cpu")
    with pytest.raises(InputError, match=r"torch_xla's, for TPUs"):
        make_optimizer("adamw_torch_xla", parameters(), device_type="cpu")
    with pytest.raises(InputError, match=r"optim_target_modules.*hand in a callable"):
        make_optimizer("galore_adamw_layerwise", parameters(), device_type="cpu")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("lion_8bit", "bitsandbytes.optim"),
        ("adamw_torch_4bit", "torchao.optim"),
        ("schedule_free_sgd", "schedulefree"),
    ],
)
def test_training_without_the_library_says_what_to_install(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"pip install {module.partition('.')[0]}"):
        make_optimizer(name, parameters(), device_type="cpu")


def test_a_callable_that_returns_no_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match="returned list, which is no"):
        make_optimizer(list, parameters(), device_type="cpu")  # type: ignore[arg-type]


def test_callables_are_known_by_their_qualified_name() -> None:
    assert qualified_name(my_sgd) == f"{__name__}.my_sgd"
    assert qualified_name(functools.partial(my_sgd)) == f"{__name__}.my_sgd"
    assert qualified_name(torch.optim.SGD) == "torch.optim.sgd.SGD"
    assert qualified_name(functools.partial) == "functools.partial"


def test_a_fused_optimizer_for_complex_weights_is_refused_with_one_that_works() -> None:
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    text = (
        r"parameters of torch.complex64.*real numbers only.*optimizer=\"adamw_torch\""
    )
    with pytest.raises(InputError, match=text):
        make_optimizer("adamw_torch_fused", model.parameters(), device_type="cpu")
    assert make_optimizer("adamw_torch", model.parameters(), device_type="cpu")
