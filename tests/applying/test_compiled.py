"""A plan on a compiled model: eager where it recomputes, as it was after undo."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from budgetfit.applying.run.run import Run
from budgetfit.applying.torch_compile import (
    compiled_modules,
    disable_compile,
    unwrap_compiled,
    unwrap_compiled_for,
)
from budgetfit.applying.undo import Undo
from tests.applying.ranks.training_runs import (
    PAIRS,
    assert_same,
    batches,
    recipe,
    start,
)
from tests.applying.small_models import batch_for, make

COUNTED: list[int] = []


def counting(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
    """Stand in for a compiler, as ``backend=`` of torch.compile; notes what it got."""
    COUNTED.append(len(graph.graph.nodes))
    return graph.forward


def compiled(how: str) -> nn.Module:
    """Return the stack with something in it compiled in one of the three ways."""
    model = make("stack")
    if how == "in place":
        model.compile(backend=counting)
    elif how == "block in place":
        model.get_submodule("layers.3").compile(backend=counting)
    elif how == "forward":
        block = model.get_submodule("layers.3")
        block.forward = torch.compile(block.forward, backend=counting)
    elif how == "wrapped block":
        layers = model.get_submodule("layers")
        layers[3] = torch.compile(layers[3], backend=counting)
    return model


WAYS = {
    "in place": "the model",
    "block in place": r"'layers\.3'",
    "forward": r"'layers\.3'",
    "wrapped block": r"'layers\.3'",
}


@pytest.mark.parametrize("how", WAYS)
def test_compiled_code_is_off_with_a_warning_where_the_plan_recomputes(
    how: str,
) -> None:
    COUNTED.clear()
    model = compiled(how)
    before = compiled_modules(model)
    assert len(before) == 1
    with pytest.warns(UserWarning, match=f"switched off for {WAYS[how]} until run.un"):
        run = Run(model, recipe(segments=PAIRS), learning_rate=0.01)
    plain = start(recipe(segments=PAIRS))
    for each in (run, plain):
        torch.manual_seed(5)
        each.step(batches(1)[0])
    assert not COUNTED
    assert_same(run, plain)
    run.undo()
    assert compiled_modules(model) == before


def test_a_plan_that_keeps_everything_leaves_it_on_and_says_what_that_means() -> None:
    COUNTED.clear()
    model = compiled("in place")
    with pytest.warns(UserWarning, match="compiled, and the plan's bytes and times"):
        run = Run(model, recipe())
    run.step(batches(1)[0])
    assert COUNTED
    with pytest.warns(UserWarning, match="switched off"):
        run.adopt(recipe(segments=PAIRS))
    COUNTED.clear()
    run.step(batches(1)[0])
    assert not COUNTED


def test_the_module_in_a_wrapper_is_what_trains() -> None:
    model = make("stack")
    wrapper = torch.compile(model, backend=counting)
    assert unwrap_compiled(wrapper) is model
    with pytest.warns(UserWarning, match=r"run\.model is the model without"):
        assert unwrap_compiled_for(wrapper, recipe(segments=PAIRS)) is model
    assert unwrap_compiled_for(wrapper, recipe()) is wrapper
    assert unwrap_compiled_for(model, recipe(segments=PAIRS)) is model


def test_a_trace_runs_eagerly_and_says_nothing() -> None:
    COUNTED.clear()
    model = make("stack")
    block = model.get_submodule("layers.3")
    block.forward = torch.compile(block.forward, backend=counting)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        twin, batch = copy.deepcopy((model, batch_for("stack")))
    with mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(twin, recipe()).step(batch)
    assert not COUNTED


def test_a_model_without_compiled_parts_is_left_alone() -> None:
    model = make("stack")
    undo = Undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disable_compile(model, undo, recipe())
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_words_fit_one_module_and_several() -> None:
    model = make("stack")
    for layer in (0, 1, 2):
        model.get_submodule(f"layers.{layer}").compile(backend=counting)
    with pytest.warns(UserWarning, match=r"off for 'layers\.0' and 2 more until"):
        Run(model, recipe(segments=PAIRS)).undo()
    with pytest.warns(UserWarning, match=r"^'layers\.0' and 2 more are compiled, and"):
        Run(model, recipe())


AFTER = {
    "wrapped": "The model is compiled after apply",
    "in place": "The model is compiled after apply",
    "treated blocks": r"'layers\.0' and 1 more are compiled after apply",
    "inside treated blocks": r"are compiled after apply",
}


@pytest.mark.parametrize("how", AFTER)
def test_compiled_after_apply_treated_blocks_run_eagerly_and_nothing_else_changes(
    how: str,
) -> None:
    torch._dynamo.reset()
    data = batches(2)
    plain = [start(recipe(segments=PAIRS)).step(batch).item() for batch in data[:1]]
    run = start(recipe(segments=PAIRS))
    layers = run.model.get_submodule("layers")
    if how == "wrapped":
        run.model = torch.compile(run.model, backend=counting)
    elif how == "in place":
        run.model.compile(backend=counting)
    elif how == "treated blocks":
        for block in (layers[0], layers[3]):
            block.compile(backend=counting)
    else:
        for block in (layers[0], layers[3]):
            for name, child in list(block.named_children()):
                setattr(block, name, torch.compile(child, backend=counting))
    COUNTED.clear()
    with pytest.warns(UserWarning, match=AFTER[how]):
        first = run.step(data[0]).item()
    assert [first] == pytest.approx(plain)
    # Of treated blocks nothing is compiled.
    assert (not COUNTED) is (how == "treated blocks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(data[1])
