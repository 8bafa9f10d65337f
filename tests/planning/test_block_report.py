from dataclasses import replace

import pytest

from budgetfit.core.block_report import BlockRow, find_block
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_points, chain_time_ns
from budgetfit.planning.reports.block_report import block_rows
from budgetfit.solvers.chain_dp import chain_dp
from budgetfit.solvers.problem import Problem
from tests.solvers.chains import (
    block,
    chain_of,
    equal_blocks,
    option,
    random_chain,
    seeded,
    single,
)
from tests.solvers.exhaustive import all_plans

MS = 1_000_000
PRODUCT = ("aten.mm.default:0",)
OPTIONS = (
    option("keep", 40, 50, 20),
    option("recompute", 4, 50, 60, extra=3 * MS),
    replace(option("selective", 12, 50, 30, extra=MS), saved_ops=PRODUCT),
)
CHAIN = chain_of(*equal_blocks(4, *OPTIONS), static=100)


def rows(*segments: Segment, limit: int = 300) -> tuple[BlockRow, ...]:
    return block_rows(CHAIN, segments, limit)


def test_each_row_says_what_waits_before_its_block_and_what_is_alive_in_it() -> None:
    first, second, third, _ = rows(*single(0))
    # Static bytes, then 4 of the recomputed block, then 40 of a kept one.
    assert [r.prefix_bytes for r in (first, second, third)] == [100, 104, 144]
    # Its backward: the prefix, 4 saved, 60 above, and 1 of its output's gradient.
    assert first.peak_bytes == 100 + 4 + 60 + 1
    assert first.headroom_bytes == 300 - 165
    assert (first.choice.mode, second.choice.mode) == ("recompute", "keep")


def test_a_choice_tells_the_plan_with_only_this_changed() -> None:
    row = rows(*single(0, 1, 2))[3]
    kept, recomputed, selective = row.choices
    assert kept.plan_peak_bytes == chain_peak_bytes(CHAIN, single(0, 1, 2))
    assert recomputed.plan_peak_bytes == chain_peak_bytes(CHAIN, single(0, 1, 2, 3))
    assert recomputed.plan_ms - kept.plan_ms == pytest.approx(3)
    assert selective.saved_ops == PRODUCT
    assert selective.plan_ms - kept.plan_ms == pytest.approx(1)


def test_a_block_that_leaves_a_segment_leaves_two_parts_behind() -> None:
    whole = Segment(tuple(f"layers.{number}" for number in range(4)))
    row = rows(whole)[1]
    parts = (Segment(whole.blocks[:1]), Segment(whole.blocks[2:]))
    assert row.segment == whole.blocks
    assert row.choice.saved_bytes == 0  # its input is not kept, only the first one's
    assert row.choices[0].plan_peak_bytes == chain_peak_bytes(CHAIN, parts)
    nested = rows(replace(whole, nested=True))[1]
    nested_parts = (parts[0], replace(parts[1], nested=True))
    assert nested.nested
    assert nested.choices[0].plan_peak_bytes == chain_peak_bytes(CHAIN, nested_parts)


def test_blocks_without_a_choice_have_no_row() -> None:
    pinned = block("<prologue>", option("keep", 10, 10, 10))
    chain = chain_of(pinned, *CHAIN.blocks, static=100)
    table = block_rows(chain, (), 300)
    assert [row.name for row in table] == [each.name for each in CHAIN.blocks]
    assert table[0].prefix_bytes == 110


@pytest.mark.parametrize("seed", range(20))
def test_the_chosen_treatment_is_the_plan_and_the_highest_row_its_peak(
    seed: int,
) -> None:
    rnd = seeded(seed)
    chain = random_chain(rnd, 5)
    plan = rnd.choice(list(all_plans(Problem(chain=chain, limit_bytes=0))))
    table = block_rows(chain, plan, 100)
    peak, time_ns = chain_peak_bytes(chain, plan), chain_time_ns(chain, plan)
    for row in table:
        assert row.choice.plan_peak_bytes == peak
        assert row.choice.plan_ms == time_ns / MS
        assert row.peak_bytes <= peak
    if len(table) == len(chain.blocks):
        last = chain_points(chain, plan)[-1].bytes  # the optimizer's step
        assert max(last, *(row.peak_bytes for row in table)) == peak


@pytest.mark.parametrize("seed", range(20))
def test_no_single_change_makes_an_optimal_plan_faster_within_its_limit(
    seed: int,
) -> None:
    chain = random_chain(seeded(seed), 6)
    plans = all_plans(Problem(chain=chain, limit_bytes=0))
    lowest = min(chain_peak_bytes(chain, plan) for plan in plans)
    limit = max(lowest, chain_peak_bytes(chain, ()) * 9 // 10)
    solution = chain_dp(Problem(chain=chain, limit_bytes=limit))
    assert solution.segments is not None
    for row in block_rows(chain, solution.segments, limit):
        for choice in row.choices:
            fits = choice.plan_peak_bytes <= limit
            assert not fits or choice.plan_ms >= row.choice.plan_ms


def test_blocks_are_found_by_the_end_of_their_path() -> None:
    table = rows()
    assert find_block(table, "3") == find_block(table, "layers.3") == table[3]
    twice = (*table, replace(table[3], name="decoder.layers.3"))
    with pytest.raises(InputError, match=r"several blocks: layers.3, decoder.layers.3"):
        find_block(twice, "3")
    assert find_block(twice, "layers.3") == table[3]
    with pytest.raises(InputError, match=r"'layers.9' is not a block.*4 in all"):
        find_block(table, "layers.9")
    with pytest.raises(InputError, match="no block to explain"):
        find_block((), "layers.0")


@pytest.mark.parametrize("seed", range(20))
def test_every_choice_is_the_plan_with_one_block_changed(seed: int) -> None:
    rnd = seeded(seed)
    chain = random_chain(rnd, 6)
    names = [each.name for each in chain.blocks if len(each.options) > 1]
    plan = tuple(Segment((name,)) for name in rnd.sample(names, len(names) // 2))
    for row in block_rows(chain, plan, 100):
        others = [each for each in plan if each.blocks != (row.name,)]
        for choice in row.choices:
            own = Segment(
                (row.name,),
                choice.mode if choice.mode != "keep" else "recompute",
                choice.saved_ops,
                input_on_host=choice.input_on_host,
            )
            changed = others if choice.mode == "keep" else [*others, own]
            assert choice.plan_peak_bytes == chain_peak_bytes(chain, changed)
            assert choice.plan_ms == chain_time_ns(chain, changed) / MS
