"""The comparison of a model before and after a run notices what is left behind."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

from budgetfit.applying.undo import Undo
from tests.zoo.check import check
from tests.zoo.entry import zoo
from tests.zoo.state import assert_same, model_state

NAME = "plain ResNet"


class Net(nn.Module):
    """A layer, and attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.number = 1
        self.names = ["a"]
        self.table = {"a": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Other(Net):
    """What a model is not to become."""


def _nothing(*_: object) -> None:
    """A hook."""


FAULTS: dict[str, Callable[[Net], object]] = {
    "an attribute": lambda net: setattr(net.layer, "left", None),
    "a hidden attribute": lambda net: net.layer.__dict__.update(left=1),
    "a lost attribute": lambda net: delattr(net, "number"),
    "a value": lambda net: setattr(net, "number", 2),
    "a list": lambda net: net.names.append("b"),
    "a dict": lambda net: net.table.update(b=1),
    "a forward": lambda net: setattr(net.layer, "forward", _nothing),
    "a class": lambda net: setattr(net, "__class__", Other),
    "a hook": lambda net: net.layer.register_forward_hook(_nothing),
    "a backward hook": lambda net: net.layer.register_full_backward_hook(_nothing),
    "a tensor's hook": lambda net: net.layer.weight.register_hook(_nothing),
    "a hook behind accumulation": lambda net: (
        net.layer.weight.register_post_accumulate_grad_hook(_nothing)
    ),
    "a tensor's attribute": lambda net: setattr(net.layer.weight, "left", 1),
    "another parameter": lambda net: setattr(
        net.layer, "weight", nn.Parameter(net.layer.weight.detach())
    ),
    "a mode": lambda net: net.layer.eval(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_left_on_a_model_is_noticed(fault: str) -> None:
    net = Net()
    before = model_state(net)
    assert_same(before, model_state(net))
    FAULTS[fault](net)
    with pytest.raises(AssertionError, match="changed: "):
        assert_same(before, model_state(net))


def test_a_patched_class_is_noticed() -> None:
    net = Net()
    before = model_state(net)
    with (
        mock.patch.object(nn.Linear, "forward", _nothing),
        pytest.raises(AssertionError, match="class Linear"),
    ):
        assert_same(before, model_state(net))
    assert_same(before, model_state(net))


def test_an_undo_that_leaves_attributes_fails_the_zoo() -> None:
    def left(_: Undo, module: nn.Module, name: str, value: object) -> None:
        module.__dict__[name] = value

    with mock.patch.object(Undo, "set_attribute", left):
        outcome = check(zoo()[NAME], alternatives=False)
    assert "applied" in outcome.reasons, outcome
    assert "changed: " in outcome.reason
