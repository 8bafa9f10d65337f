from dataclasses import replace
from typing import Any

import pytest

from budgetfit.applying.out_of_memory.fallback_recipe import (
    FallbackRecipe,
    find_fallback_recipe,
)
from budgetfit.core.plan import Alternative, Plan
from budgetfit.core.recipe import Segment
from tests.reporting.sample_plans import (
    BLOCKS,
    GIB,
    MIB,
    sample_estimate,
    sample_plan,
    sample_recipe,
    singles,
)

# The plan: batch 6 x 11, 20 GiB allocated of which 15 do not grow with the batch, and
# 22 GiB reserved.
FULL = sample_recipe(segments=singles(range(24)))


def plan_with(*alternatives: Alternative) -> Plan:
    return sample_plan(alternatives=alternatives)


def judged(reserved_bytes: int = 12 * GIB, **changes: Any) -> Alternative:
    estimate = sample_estimate(
        FULL, allocated_bytes=10 * GIB, reserved_bytes=reserved_bytes
    )
    made = Alternative(label="full", estimate=estimate, fits=True)
    return replace(made, **changes)


def fallback(plan: Plan, usable_gib: int | None, growth: float = 1.0) -> FallbackRecipe:
    usable_bytes = None if usable_gib is None else usable_gib * GIB
    found = find_fallback_recipe(
        plan.recipe, plan, usable_bytes=usable_bytes, growth=growth
    )
    assert found is not None
    return found


def test_an_alternative_that_was_replayed_comes_first() -> None:
    found = fallback(plan_with(judged()), 13)
    assert found.recipe == FULL
    assert found.judged
    assert str(found) == (
        "batch_size 6 x gradient_accumulation_steps 11, 24 blocks recomputed, "
        "12.00 GiB reserved"
    )


def test_the_fastest_of_several_is_taken() -> None:
    slow = judged()
    recipe = replace(FULL, segments=singles(range(20)))
    fast = judged(estimate=sample_estimate(recipe, reserved_bytes=9 * GIB, step_ms=1.0))
    assert fallback(plan_with(slow, fast), 13).recipe == recipe


@pytest.mark.parametrize(
    "other",
    [
        judged(14 * GIB),  # too large
        judged(fits=False),
        judged(changes_training=True),
        judged(estimate=sample_estimate(replace(FULL, precision="bf16"))),
        judged(estimate=sample_estimate(replace(FULL, optimizer="sgd"))),
        judged(estimate=sample_estimate(replace(FULL, batch_size=5))),  # 55 samples
    ],
)
def test_what_does_not_fit_or_trains_other_numbers_is_passed_over(
    other: Alternative,
) -> None:
    plan = plan_with(other)
    found = find_fallback_recipe(plan.recipe, plan, usable_bytes=13 * GIB)
    assert found is None  # and 15 of 20 GiB do not shrink with the batch


def test_else_the_micro_batch_is_split_by_an_exact_divisor() -> None:
    # 3 of 6 samples: (15 + 5 x 3/6) / 20 of 22 GiB = 19.25; 2: 18.33.
    plan = plan_with()
    found = fallback(plan, 19)
    assert found.recipe == replace(
        plan.recipe, batch_size=2, gradient_accumulation_steps=33
    )
    assert found.reserved_bytes == round((15 + 5 * 2 / 6) / 20 * 22 * GIB)
    assert "about 18.33 GiB reserved" in str(found)


def test_a_batch_that_grew_takes_more_in_every_recipe() -> None:
    # Twice as long: 2 samples take (15 + 5 x 2 x 2/6) / 20 of 22 GiB = 20.17 GiB.
    assert fallback(plan_with(), 20, growth=2.0).recipe.batch_size == 1
    assert not fallback(plan_with(judged()), 13, growth=1.1).judged


def test_without_a_measured_limit_it_must_take_less_than_what_failed() -> None:
    plan = plan_with(judged(22 * GIB))
    assert fallback(plan, None).recipe.batch_size == 3
    assert fallback(plan_with(judged(21 * GIB)), None).recipe == FULL


def test_one_that_needs_more_than_what_failed_is_passed_over() -> None:
    more, less = judged(int(22.8 * GIB)), judged(int(21.5 * GIB))
    assert fallback(plan_with(more), 23).recipe.batch_size == 3
    found = fallback(plan_with(more, less), 23)
    assert found.reserved_bytes == less.estimate.reserved_bytes


def test_without_a_plan_it_is_the_next_divisor() -> None:
    recipe = sample_recipe(batch_size=6, gradient_accumulation_steps=1)
    found = find_fallback_recipe(recipe, None, usable_bytes=5 * MIB)
    assert found is not None
    assert (found.recipe.batch_size, found.recipe.gradient_accumulation_steps) == (3, 2)
    assert found.reserved_bytes is None
    assert str(found).endswith(", 16 blocks recomputed")


def test_the_treatment_of_blocks_is_said_by_kind() -> None:
    segments = (*singles(range(2)), Segment((BLOCKS[5],), mode="offload"))
    recipe = sample_recipe(batch_size=2, segments=segments)
    found = find_fallback_recipe(recipe, None, usable_bytes=None)
    assert str(found).endswith(", 2 blocks recomputed and 1 block offloaded")
    recipe = sample_recipe(batch_size=2, segments=())
    found = find_fallback_recipe(recipe, None, usable_bytes=None)
    assert str(found).endswith(", every block kept")


def test_the_effective_batch_size_is_never_changed() -> None:
    recipe = sample_recipe(batch_size=6, gradient_accumulation_steps=5)
    while (found := find_fallback_recipe(recipe, None, usable_bytes=None)) is not None:
        assert found.recipe.effective_batch_size == 30
        assert found.recipe.batch_size < recipe.batch_size
        recipe = found.recipe
    assert recipe.batch_size == 1
