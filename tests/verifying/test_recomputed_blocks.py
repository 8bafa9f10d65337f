import pytest
import torch
from torch import nn

from budgetfit.applying.run.run import Run
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.measuring.recomputed_blocks import (
    RecomputationWatcher,
    find_blocks_saving_nothing,
    recomputed_blocks,
)
from tests.applying.small_models import CHAIN, MAKERS, batch_for, make
from tests.models import mean


def recomputed(model: nn.Module, name: str, *segments: tuple[str, ...]) -> set[str]:
    return recomputed_by(model, name, *map(Segment, segments))


def recomputed_by(model: nn.Module, name: str, *segments: Segment) -> set[str]:
    seen = RecomputationWatcher()
    recipe = Recipe(batch_size=4, segments=segments)
    with (
        Run(model, recipe, on_phase=seen.on_phase) as run,
        seen.watching(model, CHAIN[name]),
    ):
        run.step(batch_for(name))
    return seen.seen


@pytest.mark.parametrize("name", MAKERS)
def test_the_blocks_of_the_segments_are_seen_and_no_others(name: str) -> None:
    # A Dropout has an inside neither of its own nor of children: the last block of the
    # segment (2, 3, 4) in the Sequential is a Linear, whose forward must run again.
    chain = CHAIN[name]
    expected = {chain[0], chain[2], chain[3], chain[4]}
    assert recomputed(make(name), name, chain[:1], chain[2:5]) == expected
    assert recomputed(make(name), name) == set()


@pytest.mark.filterwarnings("ignore:Block .* saves nothing")  # of a block without views
@pytest.mark.parametrize("name", MAKERS)
def test_recomputed_blocks_are_those_of_the_recipe_in_every_mode(name: str) -> None:
    # The Sequential's blocks 1 and 3 are Dropouts without any product to save.
    chain = CHAIN[name]
    segments = (
        Segment(chain[:1], mode="selective", saved_ops=("aten.view.default:0",)),
        Segment(chain[1:2], mode="offload"),
        Segment(chain[2:5], nested=True, input_on_host=True),
    )
    expected = {chain[0], chain[2], chain[3], chain[4]}
    assert recomputed_by(make(name), name, *segments) == expected
    recipe = Recipe(batch_size=4, segments=segments)
    assert set(recomputed_blocks(recipe)) == expected
    assert recomputed_blocks(Recipe(batch_size=4)) == ()


def test_a_users_own_checkpointing_is_seen_where_it_is_kept() -> None:
    model = make("gpt2")
    model.activation_checkpointing_enable({"use_reentrant": False})
    seen = RecomputationWatcher()
    run = Run(
        model, Recipe(batch_size=4), on_phase=seen.on_phase, keep_own_checkpointing=True
    )
    with seen.watching(model, CHAIN["gpt2"]):
        run.step(batch_for("gpt2"))
    assert seen.seen == set(CHAIN["gpt2"])


def test_a_module_that_blocks_share_says_nothing_about_either() -> None:
    model = make("stack")
    model.layers[1].dropout = model.layers[0].dropout
    first, second = CHAIN["stack"][:2]
    assert recomputed(model, "stack", (first,)) == {first}
    assert second not in recomputed(model, "stack", (first,))


def test_watching_leaves_no_hooks_and_no_forwards_behind() -> None:
    for name in ("stack", "sequential"):
        model = make(name)
        before = [dict(item.__dict__) for item in model.modules()]
        recipe = Recipe(batch_size=4, segments=(Segment(CHAIN[name][:2]),))
        with Run(model, recipe):
            inner = [dict(item.__dict__) for item in model.modules()]
            plain = [item.__dict__.get("forward") for item in model.modules()]
            wrapped = [getattr(item, "__wrapped__", None) for item in plain]
            with RecomputationWatcher().watching(model, CHAIN[name]):
                pass
            assert [dict(item.__dict__) for item in model.modules()] == inner
            assert [getattr(item, "__wrapped__", None) for item in plain] == wrapped
        assert [dict(item.__dict__) for item in model.modules()] == before


def test_a_block_of_which_nothing_is_saved_is_told_apart() -> None:
    # A view keeps no tensor for backward: nothing asks it to run again.
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.ReLU(), nn.Identity())
    found: set[str] = set()
    with find_blocks_saving_nothing(model, ["0", "1", "2", "3"], found):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert found == {"1", "3"}
    assert not model[1]._forward_hooks


def test_what_never_ran_is_not_said_to_save_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    found: set[str] = set()
    with find_blocks_saving_nothing(model, ["0"], found):
        pass
    assert found == set()


def test_a_block_that_calls_none_of_its_inside_is_seen() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    recipe = Recipe(batch_size=2, precision="fp32", segments=(Segment(("self_attn",)),))
    seen = RecomputationWatcher()
    with (
        Run(model, recipe, loss=mean, on_phase=seen.on_phase) as run,
        seen.watching(model, ["self_attn"]),
    ):
        run.step(torch.ones(2, 3, 8))
    assert seen.seen == {"self_attn"}
