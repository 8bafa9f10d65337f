"""Alternatives of a model whose tensors are whole MiB."""

import functools
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from budgetfit.applying.quantized_layers.nf4_linear import Nf4Format, Nf4Linear
from budgetfit.core.budget import Budget
from budgetfit.core.plan import Alternative, Estimate
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.peak import chain_peak_bytes, chain_time_ns
from budgetfit.planning.alternatives import alternatives
from budgetfit.planning.alternatives.alternatives import (
    EXPANDING,
    deciding_baselines,
    faster_rows,
    remaining_alternatives,
)
from budgetfit.planning.alternatives.refusal import changes_of_session
from budgetfit.planning.alternatives.training_changes import (
    training_change_rows,
    training_changes,
)
from budgetfit.planning.profiling.block_chain import (
    BlockChain,
    TrainingSettings,
    checkpoint_every_block,
)
from budgetfit.planning.search import baselines, loss_chunking
from budgetfit.planning.search.baselines import BaselineProfile, best_with_policy
from budgetfit.planning.search.loss_chunking import (
    best_for_objective,
    better_without_host,
    search_with_loss_chunks,
)
from budgetfit.planning.search.lowest_peak import lowest_judged
from budgetfit.planning.search.policies import policy_segments
from budgetfit.planning.search.search import _Proposals, search
from budgetfit.planning.session import PlanningSession, Request, rank
from budgetfit.solvers.batch_size import BatchCandidate, BatchChoice
from budgetfit.solvers.problem import Problem, Solution
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi, gpt2, text

ADA = find_gpu("rtx-4090")
SETTING = TrainingSettings(precision="fp32", optimizer="adamw_torch_fused")
BUDGET = Budget(total_bytes=200 * MIB, context_bytes=0, headroom_bytes=0)
FREE = Request(budget=BUDGET)


@functools.cache
def chain(gpu: str = "rtx-4090") -> BlockChain:
    workload = Workload(
        model=Mebi(6), batch=torch.zeros(2, 512, 512), gpu=find_gpu(gpu)
    ).with_found_blocks()
    return BlockChain(TraceSession(workload), SETTING)


def session(request: Request = FREE, gpu: str = "rtx-4090") -> PlanningSession:
    return PlanningSession(chain(gpu), request)


@functools.cache
def plan(request: Request) -> Estimate:
    found = search(session(request)).estimate
    assert found is not None
    return found


@functools.cache
def table(request: Request) -> dict[str, Alternative]:
    first = deciding_baselines(session(request), plan(request))
    rows = (*first, *remaining_alternatives(session(request), plan(request), first))
    assert len({row.label for row in rows}) == len(rows)
    return {row.label: row for row in rows}


@pytest.mark.parametrize("total_mib", range(70, 200, 15))
def test_no_row_that_fits_is_faster_than_what_the_plan_is_chosen_from(
    total_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan's own times, at each of its limits."""
    monkeypatch.setattr(alternatives, "training_change_rows", lambda *_: ())
    monkeypatch.setattr(alternatives, "compiled_row", lambda *_: ())
    budget = replace(BUDGET, total_bytes=total_mib * MIB)
    asked = PlanningSession(chain(), replace(FREE, budget=budget))
    found = better_without_host(search_with_loss_chunks(asked)).estimate
    if found is None:
        return
    first = deciding_baselines(asked, found)
    best = asked.best_fitting([found, *(row.estimate for row in first)])
    assert best is not None
    for row in remaining_alternatives(asked, best, first):
        assert not row.fits or asked.rank(row.estimate)[0] >= asked.rank(best)[0], row


@pytest.mark.parametrize(("share", "judged"), [(0.5, False), (1.1, True)])
def test_practices_that_are_faster_by_live_bytes_are_judged_with_the_plan(
    monkeypatch: pytest.MonkeyPatch, *, share: float, judged: bool
) -> None:
    """The allocator may reserve less for them than for what the solver proposed."""
    label, policy = baselines.BASELINES[-1]
    assert policy == "sqrt"
    chen, proposed = table(FREE)[label].estimate, plan(FREE)
    monkeypatch.setattr(alternatives, "BASELINES", baselines.BASELINES[-1:])
    per_sample = share * chen.step_ms / chen.recipe.effective_batch_size
    step_ms = per_sample * proposed.recipe.effective_batch_size
    known = replace(proposed, step_ms=step_ms)
    rows = deciding_baselines(session(FREE), known)
    assert (label in {row.label for row in rows}) == judged


@pytest.mark.parametrize("policy", ["sqrt", "every-n"])
def test_a_practice_whose_least_batch_needs_too_much_is_not_judged_with_the_plan(
    policy: str,
) -> None:
    """By the formula, whose peak is the replay's but for tenths of a per cent."""
    known = replace(plan(FREE), step_ms=1e9)
    own = chain()
    segments = policy_segments(own, policy, 1)
    least_bytes = chain_peak_bytes(own.profile_at(1), segments)
    judged = session().judge(SETTING.recipe(1, segments)).allocated_bytes
    assert judged <= least_bytes <= judged * (1 + baselines.FORMULA_EXCESS)
    for share, wanted in ((1.01, True), (0.99, False)):
        total = int(share * least_bytes / (1 + baselines.FORMULA_EXCESS))
        budget = replace(BUDGET, total_bytes=total)
        asked = PlanningSession(own, replace(FREE, budget=budget))
        assert baselines.policy_can_gain(asked, policy, known) == wanted


def test_a_practice_that_is_judged_with_the_plan_is_no_second_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("compiled_row", "training_change_rows", "_other_objectives"):
        monkeypatch.setattr(alternatives, name, lambda *_: ())
    known = replace(plan(FREE), step_ms=1e9)
    first = deciding_baselines(session(FREE), known)
    rows = (*first, *remaining_alternatives(session(FREE), known, first))
    labels = [row.label for row in rows]
    assert len(labels) == len(set(labels))
    assert sum(label.startswith("every ") for label in labels) == (
        2 if known.recipe.segments else 1
    )


def test_the_practices_the_other_objectives_and_the_levers_are_there() -> None:
    rows = table(FREE)
    assert list(rows)[:5] == [
        "everything kept",
        "every block recomputed",
        "Chen's sqrt(n) segments",
        "largest batch",
        "lowest memory",
    ]
    changing = {label for label, row in rows.items() if row.is_suggestion}
    assert changing == set(list(rows)[5:])
    assert "with pure bf16" in changing


def test_each_row_is_judged_at_its_own_best_batch() -> None:
    # The policy's program, replayed at every batch size up to one that does not fit.
    row = table(FREE)["every block recomputed"].estimate
    segments = checkpoint_every_block(chain().traces.workload.blocks)
    fitting = []
    for size in range(1, 80):
        estimate = session().judge(SETTING.recipe(size, segments))
        if estimate.fits:
            fitting.append(estimate)
    most = max(estimate.recipe.batch_size for estimate in fitting)
    assert most < 79
    fastest = min(rank(estimate, "throughput") for estimate in fitting)
    # Only some batch sizes are compared (one in eight of the larger ones).
    assert rank(row, "throughput")[0] <= fastest[0] * 1.02
    largest = best_with_policy(
        session(Request(budget=BUDGET, objective="batch_size")), "full"
    )
    assert largest.recipe.batch_size == most


def test_the_objectives_win_what_they_are_named_after() -> None:
    rows = table(FREE)
    largest, lowest = rows["largest batch"].estimate, rows["lowest memory"].estimate
    for row in rows.values():
        if row.fits and not row.is_suggestion:
            assert row.estimate.recipe.batch_size <= largest.recipe.batch_size
            assert row.estimate.reserved_bytes >= lowest.reserved_bytes
    assert "fastest" in table(Request(budget=BUDGET, objective="memory"))


def test_the_largest_batch_has_the_loss_in_parts_where_that_makes_it_larger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a plan with that objective, whatever the plan beside it has."""
    monkeypatch.setattr(loss_chunking, "LOSS_CHUNKS", (8,))
    workload = Workload(model=gpt2(vocab_size=50_000), batch=text(), gpu=ADA)
    chain = BlockChain(TraceSession(workload.with_found_blocks()), SETTING)
    asked = PlanningSession(chain, Request(budget=BUDGET, objective="batch_size"))
    whole, found = search(asked).estimate, best_for_objective(asked)
    assert whole is not None
    assert found is not None
    assert found.recipe.loss_chunks == 8
    assert found.recipe.batch_size > whole.recipe.batch_size


def test_chens_segments_are_searched_as_where_they_are_asked_for() -> None:
    # The first proposal leaves room, which later ones use.
    tight = replace(BUDGET, total_bytes=109 * MIB)
    asked = session(Request(budget=tight, checkpointing="sqrt"))
    found = best_with_policy(session().asking(budget=tight), "sqrt")
    assert found == search(asked).estimate


def test_a_batch_that_is_given_stays_in_every_row() -> None:
    rows = table(Request(budget=BUDGET, batch_size=16))
    assert {row.estimate.recipe.batch_size for row in rows.values()} == {16}
    assert "largest batch" not in rows
    assert not rows["everything kept"].fits


def test_the_optimizer_and_the_precision_of_a_lever_are_its_own() -> None:
    rows = table(Request(budget=BUDGET, batch_size=8))
    for label, row in rows.items():
        recipe = row.estimate.recipe
        eight_bit = label == "with 8-bit optimizer"
        assert (recipe.optimizer == "adamw_bnb_8bit") == eight_bit
        if not row.changes_training:
            assert recipe.precision == "fp32"


def test_levers_that_are_pulled_or_not_in_hardware_are_not_offered() -> None:
    def offered(found: PlanningSession, **changes: Any) -> list[str]:
        return [each.label for each in training_changes(found.changed(**changes))]

    assert len(offered(session())) == 4
    assert "optimizer in backward" in offered(session())
    assert "optimizer in backward" in offered(session(), accumulation=2)
    for settings in (
        {"precision": "fp16-mixed"},
        {"effective_batch_size": 8},
        {"optimizer": "adamw_torch_cpu_offload"},
        {"optimizer_in_backward": True},
    ):
        assert "optimizer in backward" not in offered(session(), **settings)
    assert "with pure bf16" not in offered(session(gpu="t4"))
    assert "with pure bf16" not in offered(session(), precision="bf16")
    assert "with 8-bit optimizer" not in offered(session(), optimizer="sgd")


@pytest.mark.parametrize(("computes", "offered"), [("float32", 0), ("bfloat16", 1)])
def test_pure_bf16_is_not_offered_to_a_base_that_is_quantised_for_fp32(
    computes: str, *, offered: int
) -> None:
    # Asked for with precision="bf16" the base computes in bf16, and is another one.
    packing = Nf4Format(compute=getattr(torch, computes))
    model = nn.Sequential(Nf4Linear(512, 512, packing, None), nn.Linear(512, 512))
    workload = Workload(model=model, batch=torch.zeros(2, 512, 512), gpu=ADA)
    quantised = BlockChain(TraceSession(workload), SETTING)
    found = training_changes(replace(session(), block_chain=quantised))
    assert [each.label for each in found].count("with pure bf16") == offered


@pytest.mark.parametrize(("frozen", "offered"), [(0, True), (2, True), (4, False)])
def test_adapters_are_offered_where_most_of_the_model_is_trained(
    frozen: int, *, offered: bool
) -> None:
    model = Mebi(6)
    for block in model.blocks[:frozen]:
        block.requires_grad_(requires_grad=False)
    workload = Workload(model=model, batch=torch.zeros(2, 512, 512), gpu=ADA)
    frozen_chain = BlockChain(TraceSession(workload.with_found_blocks()), SETTING)
    found = training_changes(replace(session(), block_chain=frozen_chain))
    assert ("with LoRA r=16" in [each.label for each in found]) == offered


def test_an_optimizer_in_backward_is_never_chosen_for_the_user() -> None:
    row = table(FREE)["optimizer in backward"]
    assert row.is_suggestion
    assert not row.changes_training
    assert row.estimate.recipe.optimizer_in_backward
    assert row.estimate.recipe.gradient_accumulation_steps == 1
    assert row.estimate.recipe.optimizer == SETTING.optimizer
    assert "no clipping" in row.note


def test_a_lever_that_gains_nothing_is_left_out() -> None:
    request = Request(budget=BUDGET, batch_size=8)
    better = replace(plan(request), step_ms=1e-3, reserved_bytes=1)
    assert training_change_rows(session(request), better) == ()


@pytest.mark.parametrize("policy", ["none", "full", "sqrt"])
def test_a_policy_that_does_not_fit_is_shown_at_its_smallest(policy: str) -> None:
    small = Budget(total_bytes=30 * MIB, context_bytes=0, headroom_bytes=0)
    found = best_with_policy(session().asking(budget=small), policy)
    assert not found.fits
    assert found.recipe.batch_size == 1


def test_long_segments_that_do_not_fit_at_the_smallest_are_tried_at_no_other() -> None:
    small = Budget(total_bytes=30 * MIB, context_bytes=0, headroom_bytes=0)
    with mock.patch.object(baselines, "best_with_segments", side_effect=AssertionError):
        found = best_with_policy(session().asking(budget=small), "sqrt")
    assert not found.fits


def test_everything_kept_is_solved_without_the_traces_of_other_options() -> None:
    workload = chain().traces.workload
    fresh = BlockChain(TraceSession(workload), SETTING)
    asked = PlanningSession(fresh, Request(budget=BUDGET, batch_size=1))
    proposals = _Proposals(asked)
    assert proposals.roughly(BUDGET.usable_bytes).best is not None
    with mock.patch.object(BlockChain, "option_traces", side_effect=AssertionError):
        chosen = proposals.within(BUDGET.usable_bytes)
    assert chosen is not None
    assert chosen.solution.segments == ()


def test_the_only_size_that_fits_has_a_time_though_it_was_not_replayed() -> None:
    """The whole effective batch may be one, where each size is traced for itself."""
    batches = BaselineProfile(session(), ())
    with mock.patch.object(TraceSession, "is_affine", return_value=False):
        assert batches._time(4).forward_ns > 0


def test_where_each_size_is_traced_none_is_that_cannot_fit() -> None:
    batches = BaselineProfile(
        session(), checkpoint_every_block(chain().traces.workload.blocks)
    )
    bound, other = (
        batches._largest_by_live_bytes(affine=affine) for affine in (True, False)
    )
    assert bound == other
    replayed: list[int] = []

    def fits_in_replay(size: int) -> bool:
        replayed.append(size)
        return size < bound - 1 and size != 1  # at which it does not run

    with (
        mock.patch.object(batches, "_replayed", fits_in_replay),
        mock.patch.object(batches, "_likely_fitting", return_value=0),
        mock.patch.object(TraceSession, "is_affine", return_value=False),
    ):
        sizes = 1, 2, bound - 2, bound + 1, bound - 1
        fits = [batches._fits(size) for size in sizes]
    assert fits == [False, True, True, False, False]
    assert replayed == [1, 2, bound - 2, bound - 1]


@pytest.mark.parametrize(("largest", "found"), [(16, 16), (15, 8), (7, 3), (2, 2)])
def test_where_each_size_is_traced_the_likely_largest_is_replayed_first(
    largest: int, found: int
) -> None:
    # Two samples reserve 12 MiB, each further one 2 MiB: 20 fit in what is usable.
    batches = BaselineProfile(tight(48), ())
    replayed: list[int] = []

    def fits_in_replay(size: int) -> bool:
        replayed.append(size)
        batches._reserved[size] = (8 + 2 * size) * MIB
        batches._seen[size] = size <= largest
        return size <= largest

    with (
        mock.patch.object(batches, "_replayed", fits_in_replay),
        mock.patch.object(batches, "_largest_by_live_bytes", return_value=60),
        mock.patch.object(TraceSession, "is_affine", return_value=False),
    ):
        fits = [batches._fits(size) for size in range(1, found + 1)]
    assert all(fits)
    assert replayed == [2, 3] + [16, 8] * (largest > 2) if found < 16 else [2, 3, 16]


def test_sizes_between_those_that_were_replayed_have_the_time_between() -> None:
    batches = BaselineProfile(session(), ())
    batches._seen = {2: True, 3: True, 8: True, 9: False}
    with mock.patch.object(TraceSession, "is_affine", return_value=False):
        times = [batches._time(size).forward_ns for size in range(1, 9)]
    assert times[0] == 2 * times[1] - times[2]
    assert times[4] == pytest.approx((3 * times[2] + 2 * times[7]) / 5, abs=1)


def test_batch_sizes_are_compared_by_the_time_that_the_judge_shows() -> None:
    batches = BaselineProfile(session(), ())
    for size in (2, 8):
        recipe = SETTING.recipe(size)
        profile = batches.profile_at(size)
        step_ns = chain_time_ns(profile, ()) + profile.optimizer_ns
        shown = session().judge(recipe).step_ms
        assert step_ns == pytest.approx(1e6 * shown, abs=2)
        assert profile.optimizer_ns < step_ns / 2


def test_the_largest_size_is_only_sought_where_it_decides() -> None:
    batches = BaselineProfile(session(), ())
    replayed: list[int] = []

    def fits_in_replay(size: int) -> bool:
        replayed.append(size)
        return size <= 22

    def fits(size: int) -> bool:
        problem = Problem(chain=batches.profile_at(size), limit_bytes=1)
        return batches.solve(problem).segments is not None

    with (
        mock.patch.object(batches, "_replayed", fits_in_replay),
        mock.patch.object(batches, "_largest_by_live_bytes", return_value=40),
    ):
        assert [fits(size) for size in (8, 32)] == [True, False]
        assert replayed == [40, 39, 37, 33, 25, 9]
        assert [size for size in range(1, 50) if fits(size)] == [*range(1, 23)]


def tight(mib: int) -> PlanningSession:
    return session().asking(budget=replace(BUDGET, total_bytes=mib * MIB))


@pytest.mark.parametrize(("mib", "rows"), [(60, []), (108, [EXPANDING]), (126, [])])
def test_expandable_segments_are_a_row_where_they_make_a_plan_faster(
    mib: int, rows: list[str]
) -> None:
    asked = tight(mib)
    found = search_with_loss_chunks(asked).estimate
    assert found is not None
    faster = faster_rows(asked, found)
    assert [row.label for row in faster] == rows
    for row in faster:
        assert row.is_suggestion
        assert 'allocator="expandable_segments:True"' in row.note
        assert row.estimate.samples_per_s > 1.02 * found.samples_per_s
    assert not faster_rows(asked.with_expandable_segments(), found)


@pytest.mark.parametrize(("mib", "offered"), [(260, False), (290, True)])
def test_expandable_segments_are_suggested_where_gaps_are_all_that_is_too_much(
    mib: int, *, offered: bool
) -> None:
    # Tensors of 9 MiB: two in a segment of 20.
    model = nn.Sequential(*(nn.Linear(1536, 1536, bias=False) for _ in range(7)))
    workload = Workload(model=model, batch=torch.zeros(2, 1536), gpu=ADA)
    chain = BlockChain(TraceSession(workload.with_found_blocks()), SETTING)
    asked = replace(tight(mib), block_chain=chain)
    least = lowest_judged(asked)
    assert (least.fits, least.allocated_bytes <= mib * MIB) == (False, offered)
    found = [
        each.suggestion()
        for each in changes_of_session(asked, least)
        if each.name == "allocator"
    ]
    assert len(found) == offered
    for each in found:
        assert each is not None
        assert each.arguments == {"allocator": "expandable_segments:True"}
        assert each.peak_bytes <= mib * MIB
        assert not each.changes_training


@pytest.mark.parametrize(
    ("refused", "known_ns", "others"), [(32, 80, True), (32, 73, False), (4, 80, False)]
)
def test_beside_a_refused_size_another_is_tried_where_it_is_faster(
    refused: int, known_ns: int, *, others: bool
) -> None:
    sizes = {
        size: BatchCandidate(
            batch_size=size,
            gradient_accumulation_steps=1,
            solution=Solution(segments=(), proven_optimal=True, explanation=""),
            ns_per_sample=Fraction(time_ns),
        )
        for size, time_ns in {4: 80, 8: 72, 32: 65}.items()
    }
    proposals = _Proposals(session())
    tried = BatchChoice(best=sizes[32], considered=tuple(sizes.values()))
    proposals._roughly[0] = tried
    best = replace(
        plan(FREE),
        recipe=replace(plan(FREE).recipe, batch_size=4),
        step_ms=4 * known_ns / 1e6,
        network_ms=0.0,
        time_factor=1.0,
    )
    assert proposals.may_be_faster_beside(0, sizes[refused], best) == others
    assert proposals._refused == ({refused} if others else set())
