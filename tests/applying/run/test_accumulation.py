import pytest

from budgetfit.applying.run.accumulation import AccumulationGroup
from budgetfit.errors import InputError


def test_equal_micro_batches_are_divided_by_their_number_and_nothing_else() -> None:
    group = AccumulationGroup(4)
    assert [group.divisor(8) for _ in range(4)] == [4, 4, 4, 4]
    assert group.is_complete
    assert group.gradient_scale == 1.0


def test_a_group_that_ends_early_is_the_mean_of_those_that_came() -> None:
    # 1/4 + 1/4 + 1/4 of three losses, times 4/3: a third each.
    group = AccumulationGroup(4)
    for _ in range(3):
        group.divisor(8)
    assert not group.is_complete
    assert group.gradient_scale == pytest.approx(4 / 3)


@pytest.mark.parametrize("weights", [(8, 8, 8, 2), (2, 8, 8, 8), (3, 5), (7,)])
def test_every_sample_counts_the_same_whatever_micro_batch_it_is_in(
    weights: tuple[int, ...],
) -> None:
    group = AccumulationGroup(4)
    shares = [1 / group.divisor(weight) for weight in weights]
    shares = [share * group.gradient_scale for share in shares]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights])


def test_shares_of_the_mean_are_only_added_up() -> None:
    group = AccumulationGroup(4)
    assert [group.divisor(weight, share=True) for weight in (8, 8, 2)] == [1, 1, 1]
    assert group.gradient_scale == 1.0


def test_shares_and_means_do_not_mix() -> None:
    group = AccumulationGroup(2)
    group.divisor(8)
    with pytest.raises(InputError, match="for all micro-batches of a group or"):
        group.divisor(8, share=True)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "a", [1]])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    group = AccumulationGroup(2)
    with pytest.raises(InputError, match=r"must weigh something.* num_items_in_batch"):
        group.divisor(weight)
    assert group.count == 0
