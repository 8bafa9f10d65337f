"""budgetfit.estimate: the memory of given settings, and no decision."""

import functools
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import budgetfit
from budgetfit import Estimate, InputError, Recipe
from tests.api.planned import CARD, SAMPLE_OF_MEBI, Fingerprint, plan_mebi, vram_bytes
from tests.models import EXAMPLES, LENGTH, MIB, SAMPLES, VOCABULARY, Mebi, gpt2_config

FP32 = {"precision": "fp32"}


@functools.cache
def mebi(recipe: Recipe | None = None, **options: Any) -> Estimate:
    settings: dict[str, Any] = {"gpu": CARD, "batch": SAMPLE_OF_MEBI, **options}
    return budgetfit.estimate(Mebi(3), recipe, **settings)


def gpt2(**options: Any) -> Estimate:
    example = EXAMPLES["gpt2"]
    model = options.pop("model", None) or example.model()
    batch = options.pop("batch", example.batch)
    return budgetfit.estimate(model, gpu=CARD, batch=batch, **options)


def test_without_a_recipe_the_model_is_taken_as_it_is() -> None:
    found = mebi()
    assert found.recipe == Recipe(batch_size=SAMPLES, precision="as-is")
    # three weights of one MiB and the two moments of each
    assert found.at_peak_bytes["parameters"] == 3 * MIB
    assert found.at_peak_bytes["optimizer_state"] >= 6 * MIB
    assert found.fits is True


def test_an_estimate_of_a_plans_recipe_is_the_plans_own() -> None:
    plan = plan_mebi(120, checkpointing="sqrt", effective_batch_size=8)
    again = budgetfit.estimate(
        Mebi(6),
        plan.recipe,
        gpu=CARD,
        vram=vram_bytes(120),
        headroom=0,
        batch=SAMPLE_OF_MEBI,
    )
    assert again.timeline == plan.estimate.timeline
    assert again.step_ms == plan.estimate.step_ms
    assert again.process_bytes == plan.estimate.process_bytes
    assert again.fits


def test_each_sample_takes_what_the_blocks_keep_of_it() -> None:
    # Even numbers from 10 MiB on are segments of their own and leave no remainder.
    ten, more = (
        mebi(Recipe(batch_size=size)).phase_peaks_bytes["forward"] for size in (10, 18)
    )
    # a block keeps its input and its tanh, of one MiB each; the last sum is still there
    # and its mean takes a little
    assert 0 <= more - ten - 8 * (3 * 2 + 1) * MIB <= 4096


def test_the_limit_decides_whether_it_fits_and_nothing_else() -> None:
    recipe = Recipe(batch_size=8)
    wide = mebi(recipe)
    tight = mebi(recipe, vram=vram_bytes(100), headroom=0)
    assert wide.fits is True
    assert tight.fits is False  # 114 MiB
    assert tight.reserved_bytes == wide.reserved_bytes == 114 * MIB


def test_the_models_own_checkpointing_is_seen() -> None:
    plain, own = EXAMPLES["gpt2"].model(), EXAMPLES["gpt2"].model()
    switch_on = getattr(own, "activation_checkpointing_enable", None)
    (switch_on or own.gradient_checkpointing_enable)()
    before = Fingerprint.of(own)
    # 16 samples: what is recomputed outweighs a workspace (torch 2.11)
    batch = {name: value.repeat(8, 1) for name, value in EXAMPLES["gpt2"].batch.items()}
    kept, recomputed = (gpt2(model=model, batch=batch) for model in (plain, own))
    assert kept.recipe.segments == ()
    assert len(recomputed.recipe.wrapped_blocks) == 3
    assert recomputed.allocated_bytes < kept.allocated_bytes
    Fingerprint.of(own).assert_equal(before)


def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    frozen = EXAMPLES["gpt2"].model()
    for parameter in frozen.transformer.h.parameters():
        parameter.requires_grad_(False)
    before = Fingerprint.of(frozen)
    part, whole = gpt2(model=frozen), gpt2()
    assert part.at_peak_bytes["parameters"] == whole.at_peak_bytes["parameters"]
    # 3 blocks of 12 x 32^2 + 13 x 32 parameters, two moments of 4 bytes each
    states = 3 * (12 * 32**2 + 13 * 32) * 2 * 4
    saved = (
        whole.at_peak_bytes["optimizer_state"] - part.at_peak_bytes["optimizer_state"]
    )
    assert saved >= states
    Fingerprint.of(frozen).assert_equal(before)


def test_tied_weights_are_there_once() -> None:
    tied = EXAMPLES["gpt2"].model()
    untied = EXAMPLES["gpt2"].model()
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    once, twice = gpt2(model=tied), gpt2(model=untied)
    # one more embedding of 64 x 32 floats
    more = twice.at_peak_bytes["parameters"] - once.at_peak_bytes["parameters"]
    assert more == VOCABULARY * 32 * 4
    assert tied.lm_head.weight is tied.transformer.wte.weight


def test_a_model_on_meta_takes_what_a_real_one_takes() -> None:
    on_meta = EXAMPLES["gpt2"].model().to("meta")
    on_meta.tie_weights()
    assert gpt2(model=on_meta) == gpt2()


def test_a_config_is_a_model_without_weights() -> None:
    config = gpt2_config(n_positions=LENGTH, n_layer=2)
    found = budgetfit.estimate(config, vram="8GB", max_length=8)
    assert any("no card named" in note for note in found.notes)
    # ids and labels of 2 samples of 8 tokens, in units of 512 bytes
    assert found.at_peak_bytes["batch"] == 2 * 512


def test_a_loss_of_the_users_is_part_of_the_step() -> None:
    example = EXAMPLES["transformer"]

    def squares(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        wide = outputs[..., None] * batch["src"].new_ones(1 << 18)
        return wide.square().mean()

    plain, heavy = (
        budgetfit.estimate(example.model(), gpu=CARD, batch=example.batch, loss=loss)
        for loss in (None, squares)
    )
    # 2 samples of 6 x 4 outputs, each a MiB wide, saved once for the square
    assert heavy.allocated_bytes - plain.allocated_bytes >= 2 * 6 * 4 * MIB


def test_a_vast_batch_is_predicted_from_small_ones() -> None:
    # a million ids: more whole numbers than are followed, and GPT-2 asks about them
    vast = gpt2(recipe=Recipe(batch_size=1 << 17, **FP32))
    small = [gpt2(recipe=Recipe(batch_size=size, **FP32)) for size in (64, 128)]
    slope = (small[1].allocated_bytes - small[0].allocated_bytes) / 64
    assert vast.allocated_bytes == pytest.approx(slope * (1 << 17), rel=0.05)


def test_a_function_in_a_recipe_is_refused_with_the_form_that_works() -> None:
    def half_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    with pytest.raises(InputError, match=r"Recipe\(..., optimizer=") as refused:
        Recipe(batch_size=4, optimizer=half_sgd)  # type: ignore[arg-type]
    (name,) = re.findall(r'optimizer="(.*)"\), optimizer=half_sgd', str(refused.value))
    found = mebi(Recipe(batch_size=4, optimizer=name), optimizer=half_sgd)
    assert found.recipe.optimizer == name


def test_a_function_that_the_recipe_does_not_name_is_refused_with_its_name() -> None:
    with pytest.raises(InputError, match=r"with optimizer=\S+SGD"):
        mebi(Recipe(batch_size=4), optimizer=torch.optim.SGD)


@pytest.mark.parametrize("what", ["optimizer", "precision"])
def test_what_is_no_name_is_refused_where_the_recipe_is_made(what: str) -> None:
    with pytest.raises(InputError, match=f"{what} must be a name"):
        Recipe(batch_size=4, **{what: None})


def test_without_a_recipe_any_optimizer_may_be_asked_about() -> None:
    plain, named, function = (
        budgetfit.estimate(Mebi(), gpu=CARD, batch=SAMPLE_OF_MEBI, **given)
        for given in ({}, {"optimizer": "sgd"}, {"optimizer": torch.optim.SGD})
    )
    assert plain.at_peak_bytes["optimizer_state"] > 0
    for estimate in (named, function):
        assert not estimate.at_peak_bytes.get("optimizer_state")
    assert function.recipe.optimizer == "torch.optim.sgd.SGD"
