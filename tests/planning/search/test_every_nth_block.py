"""Every n-th block recomputed, as transformers counts and as the judge sees it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.core.budget import Budget
from budgetfit.core.recipe import Segment
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.planning.alternatives.alternatives import (
    deciding_baselines,
    remaining_alternatives,
)
from budgetfit.planning.profiling.block_chain import (
    BlockChain,
    TrainingSettings,
    checkpoint_every_block,
)
from budgetfit.planning.search.policies import (
    every_n_of_segments,
    every_nth,
    fastest_every_nth,
    fixed_segments,
    ordinal,
    parse_every_n,
)
from budgetfit.planning.search.search import search
from budgetfit.planning.session import PlanningSession, Request
from budgetfit.solvers.problem import Problem
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.integrations.tiny_training import KINDS, blocks_of, tiny_model
from tests.models import MIB, Mebi

SETTING = TrainingSettings(precision="fp32", optimizer="adamw_torch_fused")


def names(count: int) -> tuple[str, ...]:
    return tuple(f"layers.{number}" for number in range(count))


def chains() -> BlockChain:
    workload = Workload(
        model=Mebi(8), batch=torch.zeros(2, 512, 512), gpu=find_gpu("rtx-4090")
    ).with_found_blocks()
    return BlockChain(TraceSession(workload), SETTING, frozenset())


@given(st.integers(1, 80), st.integers(1, 80))
def test_the_number_is_found_again_in_what_it_recomputes(count: int, n: int) -> None:
    blocks = names(count)
    found = every_n_of_segments(every_nth(blocks, n), blocks)
    assert found is not None
    assert every_nth(blocks, found) == every_nth(blocks, n)
    assert found == n or n >= count


@given(st.sets(st.integers(0, 11)))
def test_what_no_number_says_has_none(chosen: set[int]) -> None:
    blocks = names(12)
    segments = tuple(Segment((blocks[number],)) for number in sorted(chosen))
    every = {tuple(range(0, 12, n)): n for n in range(12, 0, -1)}
    expected = every.get(tuple(sorted(chosen))) if chosen else 0
    assert every_n_of_segments(segments, blocks) == expected


@pytest.mark.parametrize(
    "change", [{"mode": "offload"}, {"input_on_host": True}], ids=str
)
def test_only_ordinary_checkpointing_has_a_number(change: dict[str, Any]) -> None:
    blocks = names(4)
    segments = (Segment((blocks[0],)), Segment((blocks[2],), **change))
    assert every_n_of_segments(segments, blocks) is None
    assert (
        every_n_of_segments((Segment(blocks[:2]), Segment(blocks[2:])), blocks) is None
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_transformers_counts_as_the_policy_does(kind: str, n: int) -> None:
    model: Any = tiny_model(kind)
    blocks = blocks_of(model)
    model.activation_checkpointing_enable(every_n_layers=n)
    on = [name for name in blocks if model.get_submodule(name).gradient_checkpointing]
    asked = fixed_segments(f"every-{n}", blocks)
    assert [segment.blocks[0] for segment in asked] == on


@pytest.mark.parametrize("text", ["every-0", "every-", "every--1", "every-x", "every"])
def test_a_policy_without_a_number_is_refused(text: str) -> None:
    assert parse_every_n(text) is None
    with pytest.raises(InputError, match="every-2 \\(every second block; any number"):
        fixed_segments(text, names(4))


def test_every_first_block_is_every_block() -> None:
    assert fixed_segments("every-1", names(5)) == checkpoint_every_block(names(5))


def test_ordinals() -> None:
    found = [ordinal(n) for n in (2, 3, 4, 11, 12, 13, 21, 22, 111)]
    assert found == [
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "13th",
        "21st",
        "22nd",
        "111th",
    ]


def test_the_solver_proposes_the_fastest_number_within_the_budget() -> None:
    chain = chains().profile_at(8)
    blocks = chains().traces.workload.blocks
    plans = [every_nth(blocks, n) for n in range(2, len(blocks))]
    peaks = {plan: chain_peak_bytes(chain, plan) for plan in plans}
    assert len(set(peaks.values())) > 2
    for limit_bytes in {*peaks.values(), min(peaks.values()) - 1}:
        found = fastest_every_nth(Problem(chain=chain, limit_bytes=limit_bytes))
        fitting = [plan for plan in plans if peaks[plan] <= limit_bytes]
        if not fitting:
            assert found.segments is None
            continue
        assert found.segments is not None
        assert chain_peak_bytes(chain, found.segments) <= limit_bytes
        assert chain_time_ns(chain, found.segments) == min(
            chain_time_ns(chain, plan) for plan in fitting
        )


def session(found: BlockChain, total_mib: int) -> PlanningSession:
    budget = Budget(total_bytes=total_mib * MIB, context_bytes=0, headroom_bytes=0)
    return PlanningSession(found, Request(budget=budget, batch_size=8))


def rows_of(found: BlockChain, total_mib: int) -> tuple[dict[str, Any], Any]:
    asked = session(found, total_mib)
    plan = search(asked).estimate
    assert plan is not None
    first = deciding_baselines(asked, plan)
    rows = (*first, *remaining_alternatives(asked, plan, first))
    return {row.label: row.estimate for row in rows}, plan


def test_the_row_fits_and_is_between_every_block_and_the_plan() -> None:
    found = chains()
    blocks = found.traces.workload.blocks
    ample = session(found, 4096)
    full = ample.judge(SETTING.recipe(8, checkpoint_every_block(blocks)))
    kept = ample.judge(SETTING.recipe(8, ()))
    between = (full.reserved_bytes + kept.reserved_bytes) // 2 // MIB + 8

    rows, plan = rows_of(found, between)

    label = next(label for label in rows if label.endswith("nd block recomputed"))
    row = rows[label]
    n = every_n_of_segments(row.recipe.segments, blocks)
    assert label == f"every {ordinal(n or 0)} block recomputed"
    assert row.fits
    assert row.recipe.loss_chunks == 1
    assert rows["every block recomputed"].step_ms > row.step_ms
    assert row.samples_per_s <= plan.samples_per_s * (1 + 1e-9)


def test_where_all_is_kept_there_is_no_such_row() -> None:
    rows, plan = rows_of(chains(), 4096)
    assert plan.recipe.segments == ()
    assert not [label for label in rows if "every " in label and "th" in label]
