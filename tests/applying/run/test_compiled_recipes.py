"""A recipe with compiled blocks trains as the plain model does, and is undone."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit.applying import torch_compile
from budgetfit.applying.run.run import Run
from budgetfit.applying.run.step_monitor import StepMonitor
from budgetfit.applying.torch_compile import compile_blocks, compiled_modules
from budgetfit.applying.undo import Undo
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.samples.sample_dims import FIRST_DIM
from budgetfit.errors import InputError
from tests import models
from tests.applying.small_models import BLOCKS, batch_for, make

# Dynamo asks tensors for their gradients, and hides the warning of that from users.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]
NAMES = tuple(f"layers.{n}" for n in range(BLOCKS))
GRAPHS: list[torch.fx.GraphModule] = []


def noting(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
    GRAPHS.append(graph)
    return graph.forward


def compiled(block: nn.Module) -> Callable[..., Any]:
    return torch.compile(block.forward, backend=noting)


def partitioned(block: nn.Module) -> Callable[..., Any]:
    """Compile to graphs that are split by tags, and run op by op."""

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        GRAPHS.append(graph)
        split = torch._dynamo.lookup_backend("aot_eager_decomp_partition")
        return split(graph, inputs)

    return torch.compile(block.forward, backend=note)


def alone(*names: str) -> tuple[Segment, ...]:
    return tuple(Segment((name,)) for name in names)


TREATED = {
    "kept": (),
    "recomputed": alone(*NAMES),
    "some recomputed": alone(*NAMES[:2]),
    "segments": (Segment(NAMES[:3]), Segment(NAMES[3:])),
    "nested": (Segment(NAMES[:4], nested=True),),
    "selective": (Segment(NAMES[:1], "selective", saved_ops=("aten.tanh.default:0",)),),
    "offloaded": (Segment(NAMES[1:2], "offload"),),
    "input on host": (Segment(NAMES[1:2], input_on_host=True),),
}


def losses(run: Run, steps: int = 3) -> list[float]:
    torch.manual_seed(3)
    return [run.step(batch_for("stack")).item() for _ in range(steps)]


@pytest.mark.parametrize("how", TREATED)
def test_every_treatment_trains_as_without_compile(how: str) -> None:
    torch._dynamo.reset()  # what other tests compiled
    GRAPHS.clear()
    recipe = Recipe(batch_size=4, segments=TREATED[how], compile="blocks")
    model, plain = make("stack"), make("stack")
    plain.load_state_dict(model.state_dict())
    keys = list(model.state_dict())
    with Run(model, recipe, blocks=NAMES, compile_forward=compiled) as run:
        assert list(model.state_dict()) == keys
        found = losses(run)
    assert GRAPHS
    with Run(plain, Recipe(batch_size=4)) as eager:
        expected = losses(eager)
    assert found == pytest.approx(expected, rel=1e-5)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name])
    assert all("forward" not in vars(module) for module in model.modules())


class Sized(nn.Module):
    """A block with a width of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_blocks_of_many_sizes_are_all_compiled() -> None:
    """They share their code, of which dynamo compiles few versions by itself."""
    torch._dynamo.reset()  # what other tests compiled
    GRAPHS.clear()
    config = torch._dynamo.config
    # Models of other tests that are still applied have raised both limits.
    with config.patch(recompile_limit=2, accumulated_recompile_limit=3):
        limits = config.recompile_limit, config.accumulated_recompile_limit
        train_blocks_of_sizes(4)
        assert (config.recompile_limit, config.accumulated_recompile_limit) == limits
    assert len(GRAPHS) >= 4


def test_limits_of_compiled_models_undone_in_any_order() -> None:
    config = torch._dynamo.config
    limit = config.recompile_limit
    first, second = Undo(), Undo()
    for undo in (first, second):
        model = nn.Sequential(Sized(4), Sized(5))
        compile_blocks(model, Recipe(batch_size=4, compile="blocks"), "01", undo)
    first()
    assert config.recompile_limit == limit + 4
    second()
    assert config.recompile_limit == limit


def train_blocks_of_sizes(blocks: int) -> None:
    model = nn.Sequential(*(Sized(4 + n) for n in range(blocks)))
    recipe = Recipe(batch_size=4, compile="blocks")
    names = tuple(str(n) for n in range(blocks))
    with Run(
        model,
        recipe,
        loss=lambda outputs, _: outputs.sum(),
        blocks=names,
        compile_forward=compiled,
    ) as run:
        run.step(torch.ones(4, 4))


IN_GRAPH = ("kept", "recomputed", "some recomputed")


def test_a_compiled_model_trains_as_without_compile() -> None:
    torch._dynamo.reset()  # as above
    model, plain = make("stack"), make("stack")
    plain.load_state_dict(model.state_dict())
    recipe = Recipe(batch_size=4, compile="model")
    with Run(model, recipe, blocks=NAMES, compile_forward=compiled) as run:
        found = losses(run)
    with Run(plain, Recipe(batch_size=4)) as eager:
        assert found == pytest.approx(losses(eager), rel=1e-5)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("how", IN_GRAPH[1:])
def test_planned_blocks_are_tagged_in_the_graph_and_repeat_their_dropout(
    how: str,
) -> None:
    recipe = Recipe(batch_size=4, segments=TREATED[how], compile="model")
    model, kept = make("stack"), make("stack")
    kept.load_state_dict(model.state_dict())
    found = []
    for each, plan in ((kept, replace(recipe, segments=())), (model, recipe)):
        torch._dynamo.reset()  # as above
        GRAPHS.clear()
        with Run(each, plan, blocks=NAMES, compile_forward=partitioned) as run:
            found.append(losses(run))
        (graph,) = GRAPHS
        tags = [node for node in graph.graph.nodes if "checkpoint" in str(node.target)]
        assert len(tags) == len(plan.wrapped_blocks)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, kept.state_dict()[name])
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("how", sorted(TREATED.keys() - set(IN_GRAPH)))
def test_a_compiled_model_refuses_what_its_graph_cannot_hold(how: str) -> None:
    with pytest.raises(InputError, match="segments of one recomputed block each"):
        Recipe(batch_size=4, segments=TREATED[how], compile="model")
    with pytest.raises(InputError, match="no loss_chunks"):
        Recipe(batch_size=4, loss_chunks=2, compile="model")


def test_a_run_compiles_before_its_first_step_and_drops_what_that_made() -> None:
    torch._dynamo.reset()  # as above
    phases: list[str] = []
    recipe = Recipe(batch_size=4, compile="blocks")
    model = make("stack")
    run = Run(
        model, recipe, blocks=NAMES, compile_forward=compiled, on_phase=phases.append
    )
    run.step(batch_for("stack"))
    assert phases.count("backward") == 2
    assert phases.count("optimizer") == 1
    phases.clear()
    run.step(batch_for("stack"))
    assert phases.count("backward") == 1
    run.undo()


def test_no_step_is_dropped_whose_backward_updates_the_weights() -> None:
    torch._dynamo.reset()  # as above
    plain, model = make("stack"), make("stack")
    plain.load_state_dict(model.state_dict())
    recipe = Recipe(batch_size=4, optimizer="sgd", optimizer_in_backward=True)
    both = replace(recipe, compile="blocks")
    with Run(plain, recipe) as eager:
        expected = losses(eager)
    with Run(model, both, blocks=NAMES, compile_forward=compiled) as run:
        assert losses(run) == pytest.approx(expected, rel=1e-5)


def test_blocks_that_a_user_compiled_are_compiled_by_the_plan_instead() -> None:
    model = make("stack")
    model.get_submodule("layers.3").compile(backend=noting)
    recipe = Recipe(batch_size=4, compile="blocks")
    text = r'switched off for .*: the plan \(compile="blocks"\) compiles in its own way'
    with pytest.warns(UserWarning, match=text):
        run = Run(model, recipe, blocks=NAMES, compile_forward=compiled)
    losses(run, 1)
    run.undo()
    assert compiled_modules(model) == ["layers.3"]


@pytest.fixture(scope="module")
def plan() -> budgetfit.Plan:
    made = models.alone(
        budgetfit.plan(
            make("stack"), "1GB", batch=batch_for("stack"), batch_size=4, headroom=0
        )
    )
    recipe = replace(made.recipe, compile="blocks")
    estimate = replace(made.estimate, recipe=recipe)
    return made.changed(recipe=recipe, estimate=estimate)


def test_a_plan_is_saved_and_loaded_with_it(
    plan: budgetfit.Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert budgetfit.Plan.load(path).recipe == plan.recipe
    assert "torch.compile for the forward of each block" in str(plan)


def test_verify_on_a_cpu_says_that_it_ran_without(plan: budgetfit.Plan) -> None:
    GRAPHS.clear()
    model = make("stack")
    model.get_submodule("layers.3").compile(backend=noting)
    check = budgetfit.verify(plan, model, batch=batch_for("stack"), device="cpu")
    assert str(check).startswith("PASSED without torch.compile: ")
    assert not GRAPHS
    model.get_submodule("layers.3")(hidden_states=torch.zeros(1, 16))
    assert GRAPHS  # it is compiled again


def test_prepare_and_a_script_compile_the_blocks(
    plan: budgetfit.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("stack")
    seen: list[nn.Module] = []
    monkeypatch.setattr(
        torch_compile.torch, "compile", lambda forward, **_: seen.append(1) or forward
    )
    with plan.prepare(model):
        assert len(seen) == BLOCKS
        assert "forward" in vars(model.get_submodule("layers.5"))
    assert all("forward" not in vars(module) for module in model.modules())
    assert "COMPILED = [" in plan.to_torch_script()


def test_samples_of_another_size_are_said_to_be_compiled_anew(
    plan: budgetfit.Plan,
) -> None:
    """Dynamo runs what it does not compile any more eagerly, and only logs that."""
    model, batch = make("stack"), batch_for("stack")
    fewer = {name: each[:1] for name, each in batch.items()}
    shorter = {**batch, "x": batch["x"][..., :-1]}

    def said(recipe: Recipe, *given: dict[str, torch.Tensor]) -> list[str]:
        monitor = StepMonitor(model, torch.device("cpu"), plan, FIRST_DIM)
        monitor.expect_recipe(recipe)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for each in given:
                monitor.before_micro_batch(each, is_first=False)
        return [str(each.message) for each in caught]

    assert said(plan.recipe, batch, fewer) == []
    (text,) = said(plan.recipe, batch, shorter, shorter)
    assert "all others run eagerly" in text
    assert said(replace(plan.recipe, compile="none"), batch, shorter) == []
