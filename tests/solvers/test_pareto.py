import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.solvers.pareto import pareto_indices

Label = tuple[int, int, int]

# Few values, so that ties are everywhere; enough labels for every width of the merge.
LABELS = st.lists(
    st.tuples(*[st.integers(0, 12) for _ in range(3)]), min_size=0, max_size=80
)


def kept(labels: list[Label]) -> list[int]:
    columns = np.array(labels, np.int64).reshape(len(labels), 3).T
    return pareto_indices(*columns).tolist()


def survivors(labels: list[Label]) -> list[int]:
    """Plainly: no other is at most as large in all three; of equal ones the first."""
    return [
        number
        for number, label in enumerate(labels)
        if not any(
            all(a <= b for a, b in zip(other, label, strict=True))
            and (other != label or rival < number)
            for rival, other in enumerate(labels)
            if rival != number
        )
    ]


@given(LABELS)
def test_exactly_those_stay_that_no_other_equals_or_beats(labels: list[Label]) -> None:
    assert sorted(kept(labels)) == survivors(labels)


@given(LABELS)
def test_they_come_in_ascending_order(labels: list[Label]) -> None:
    found = [labels[number] for number in kept(labels)]
    assert found == sorted(found)


@pytest.mark.parametrize("costs", [4, 40, 400])
def test_many_labels_of_which_most_stay(costs: int) -> None:
    # What one number gives the others take, but for a little: hardly one beats another.
    rng = np.random.default_rng(0)
    cost, forward = rng.integers(0, costs, 800), rng.integers(0, 400, 800)
    backward = 800 - forward - cost * (400 // costs) + rng.integers(0, 20, 800)
    labels = [tuple(row) for row in np.stack([backward, cost, forward], 1).tolist()]
    staying = survivors(labels)
    assert len(staying) > 200
    assert sorted(kept(labels)) == staying


def test_where_one_number_follows_from_another_the_staircase_is_left() -> None:
    labels = [(3, 1, 3), (1, 5, 1), (2, 6, 2), (2, 4, 2), (4, 1, 4)]
    assert kept(labels) == [1, 3, 0]


def test_of_equal_labels_the_first_is_kept() -> None:
    assert kept([(1, 1, 1), (1, 1, 1)]) == [0]


def test_no_labels_are_no_labels() -> None:
    assert kept([]) == []
