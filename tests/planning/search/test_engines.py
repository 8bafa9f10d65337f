"""Engines side by side: the likely fastest first, and one that cannot win is shown."""

import functools
from dataclasses import replace

import pytest

from budgetfit.core.budget import Budget
from budgetfit.core.parallelism import Parallelism
from budgetfit.planning import planner
from budgetfit.planning.alternatives import alternatives, best_settings
from budgetfit.planning.search.engines import engine_can_win, likely_fastest_first
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.session import PlanningSession, Request, open_sessions
from tests.planning.search.test_holding_more import llama

WAYS = tuple(Parallelism(engine=engine, gpus=4) for engine in ("ddp", "fsdp2"))
ROOMY = Budget(total_bytes=2**34, context_bytes=0, headroom_bytes=0)
SETTINGS = {"precisions": ["bf16-mixed"], "optimizer": "adamw_torch_fused"}


@functools.cache
def sessions() -> list[PlanningSession]:
    more = {"accumulation": 2, "parallelisms": WAYS, **SETTINGS}
    return open_sessions(llama(1024, 2, 512, "rtx-4090"), Request(budget=ROOMY), **more)


def test_no_engine_that_is_left_out_is_faster() -> None:
    rows = [(each, search_with_loss_chunks(each).estimate) for each in sessions()]
    left_out = 0
    for (one, known), (other, found) in (rows, rows[::-1]):
        assert known is not None
        assert found is not None
        if not engine_can_win(other, known):
            assert other.rank(found) > one.rank(known)
            left_out += 1
    assert left_out == 1


def test_equal_ops_can_be_saved_under_each_engine() -> None:
    # FSDP2 gathers weights and reduces gradients around a block's own ops.
    ddp, fsdp2 = (
        each.block_chain.profile_at(2, exact_blocks=False) for each in sessions()
    )
    saved = [
        [option.saved_ops for option in chain.blocks[1].options if option.saved_ops]
        for chain in (ddp, fsdp2)
    ]
    assert saved[0] == saved[1]
    assert len(saved[0]) > 1


def test_the_fastest_by_formula_comes_first_and_equal_ones_in_order() -> None:
    ddp, fsdp2 = sessions()
    slow = fsdp2.asking(budget=replace(ROOMY, total_bytes=2**20))  # nothing fits
    for given in ([ddp, slow], [slow, ddp]):
        assert likely_fastest_first(given) == [ddp, slow]
    memory = [each.asking(objective="memory") for each in (slow, ddp)]
    assert likely_fastest_first(memory) == memory
    twice = [slow, replace(slow, notes=("second",))]
    assert likely_fastest_first(twice) == twice


def test_a_row_says_how_fast_an_engine_is_that_cannot_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[str] = []

    def search(session: PlanningSession) -> object:
        searched.append(session.settings.parallelism.engine)
        return search_with_loss_chunks(session)

    monkeypatch.setattr(best_settings, "search_with_loss_chunks", search)
    monkeypatch.setattr(best_settings, "engine_can_win", lambda *_: False)
    monkeypatch.setattr(alternatives, "remaining_alternatives", lambda *_: ())
    monkeypatch.setattr(planner, "traced_sessions", lambda *_, **__: sessions())
    plan = planner.make_plan(sessions()[0].workload, Request(budget=ROOMY), **SETTINGS)
    assert len(searched) == 1
    assert plan.recipe.parallelism.engine in searched
    known = [row.label for row in plan.lazy_alternatives.known]
    other = next(each.describe() for each in WAYS if each.engine not in searched)
    assert other not in known
    assert other in [row.label for row in plan.alternatives]
