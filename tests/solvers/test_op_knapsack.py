from itertools import combinations

import pytest

from budgetfit.errors import InputError
from budgetfit.solvers.op_knapsack import OpItem, pareto_op_sets
from tests.solvers.chains import seeded


def items(*rows: tuple[int, int]) -> list[OpItem]:
    return [OpItem(saved_bytes=size, saved_ns=time) for size, time in rows]


def totals(ops: list[OpItem], chosen: tuple[int, ...]) -> tuple[int, int]:
    return (
        sum(ops[number].saved_bytes for number in chosen),
        sum(ops[number].saved_ns for number in chosen),
    )


def every_set(ops: list[OpItem]) -> list[tuple[int, ...]]:
    """All sets that keep groups whole."""
    sets = [
        chosen
        for count in range(len(ops) + 1)
        for chosen in combinations(range(len(ops)), count)
    ]
    return [
        chosen
        for chosen in sets
        if not any(
            ops[one].group is not None
            and ops[one].group == ops[other].group
            and (one in chosen) != (other in chosen)
            for one in range(len(ops))
            for other in range(len(ops))
        )
    ]


def test_thousands_of_items_are_chosen_from_at_once() -> None:
    items = [OpItem(saved_bytes=k + 1, saved_ns=2 * k * k + 1) for k in range(5000)]
    sets = pareto_op_sets(items, 3)
    assert [len(each) for each in sets] == sorted({len(each) for each in sets})
    assert len(sets) == 3


def test_the_most_time_per_byte_comes_first() -> None:
    ops = items((4, 1), (1, 8), (2, 4), (90, 0))
    assert pareto_op_sets(ops, 9) == ((1,), (1, 2), (0, 1, 2))


def test_ops_that_draw_random_numbers_are_saved_together_or_not_at_all() -> None:
    ops = [
        OpItem(saved_bytes=1, saved_ns=9, group=7),
        OpItem(saved_bytes=1, saved_ns=8),
        OpItem(saved_bytes=5, saved_ns=0, group=7),
        OpItem(saved_bytes=50, saved_ns=0),
    ]
    assert pareto_op_sets(ops, 9) == ((1,), (0, 1, 2))


def test_no_mix_of_any_two_sets_beats_one_that_is_returned() -> None:
    rnd = seeded(0)
    for _ in range(60):
        ops = [
            OpItem(
                saved_bytes=rnd.randint(0, 12),
                saved_ns=rnd.randint(0, 12),
                group=rnd.choice([None, None, 0, 1]),
            )
            for _ in range(rnd.randint(1, 7))
        ]
        points = [totals(ops, chosen) for chosen in every_set(ops)]
        for chosen in pareto_op_sets(ops, 99):
            size, time = totals(ops, chosen)
            assert chosen in every_set(ops)
            for small, short in points:
                for large, long in points:
                    if small <= size <= large and small < large:
                        on_line = short * (large - size) + long * (size - small)
                        assert time * (large - small) >= on_line
                    elif small == size:
                        assert short <= time


def test_every_corner_is_there_if_so_many_may_be() -> None:
    rnd = seeded(1)
    for _ in range(40):
        ops = items(*((rnd.randint(1, 9), rnd.randint(1, 9)) for _ in range(6)))
        found = {totals(ops, chosen) for chosen in pareto_op_sets(ops, 99)}
        points = {totals(ops, chosen) for chosen in every_set(ops)}
        for slope in range(1, 100):  # a corner is best for some price of a byte
            worth = {point: 9 * 10 * point[1] - slope * point[0] for point in points}
            best = [point for point in points if worth[point] == max(worth.values())]
            everything = sum(each.saved_bytes for each in ops)
            if len(best) == 1 and 0 < best[0][0] < everything:
                assert best[0] in found


def test_saving_all_the_time_is_offered_unless_it_takes_most_of_the_bytes() -> None:
    cheap = items((10, 5), (10, 5), (20, 0))
    assert pareto_op_sets(cheap, 1) == ((0, 1),)
    dear = items((10, 5), (10, 5), (19, 0))
    assert pareto_op_sets(dear, 9) == ((0,),)


def test_a_few_sets_are_spread_over_many() -> None:
    ops = items(*[(1, 1)] * 9)
    assert [len(chosen) for chosen in pareto_op_sets(ops, 2)] == [3, 6]
    assert pareto_op_sets(ops, 0) == ()


def test_all_sets_are_offered_where_so_many_may_be() -> None:
    ops = items(*((n + 1, 1) for n in range(30)))
    assert [len(chosen) for chosen in pareto_op_sets(ops, 30)] == [*range(1, 30)]


def test_of_the_sets_without_bytes_the_one_that_saves_most_is_offered() -> None:
    ops = items((0, 2), (0, 3), (4, 1), (9, 0))
    for most in (2, 9):  # searched, and all there are
        assert pareto_op_sets(ops, most) == ((0, 1), (0, 1, 2))


def test_nothing_to_save_gives_no_set() -> None:
    assert pareto_op_sets([], 4) == ()
    assert pareto_op_sets(items((5, 0), (0, 0)), 4) == ()


def test_a_peers_three_small_items_do_not_exceed_the_room() -> None:
    # Peers round sizes: three items of 1e-4 fill a room of 1e-4 with two, and 2,000 of
    # 4e-5 a room of 0.04 with 0.08 (facts 2.2). In whole bytes every set says its own.
    ops = items(*[(4, 1)] * 80)
    for chosen in pareto_op_sets(ops, 6):
        assert totals(ops, chosen) == (4 * len(chosen), len(chosen))


def test_the_same_items_give_the_same_sets() -> None:
    rnd = seeded(2)
    ops = items(*((rnd.randint(0, 10**9), rnd.randint(0, 10**6)) for _ in range(80)))
    assert pareto_op_sets(ops, 6) == pareto_op_sets(list(ops), 6)
    assert len(pareto_op_sets(ops, 6)) == 6


@pytest.mark.parametrize(("size", "time", "most"), [(-1, 0, 1), (0, -1, 1), (0, 0, -1)])
def test_negative_numbers_are_refused(size: int, time: int, most: int) -> None:
    with pytest.raises(InputError, match="cannot be negative"):
        pareto_op_sets([OpItem(saved_bytes=size, saved_ns=time)], most)
