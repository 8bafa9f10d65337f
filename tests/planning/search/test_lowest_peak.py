"""What needs least: which recipes are tried, and which need no trace."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from budgetfit.core.budget import Budget
from budgetfit.core.memory_timeline import MemoryTimeline, TimelinePoint
from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import EMPTY_CACHE
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.chain.peak import chain_host_bytes, chain_peak_bytes
from budgetfit.planning.alternatives import best_settings
from budgetfit.planning.profiling.block_chain import (
    BlockChain,
    TrainingSettings,
    checkpoint_every_block,
)
from budgetfit.planning.search import lowest_peak
from budgetfit.planning.search.loss_chunking import (
    LOSS_CHUNKS,
    faster_than_lowest,
    search_with_loss_chunks,
    with_more_loss_chunks,
)
from budgetfit.planning.search.lowest_peak import (
    fitting_or_lowest,
    lowest_judged,
    lowest_peak_plan,
)
from budgetfit.planning.search.search import SearchResult
from budgetfit.planning.session import PlanningSession, Request
from budgetfit.solvers.batch_size_grid import LARGEST_BATCH_SIZE
from budgetfit.traces.depth_extrapolator import DepthChecks
from budgetfit.traces.session import TraceSession
from budgetfit.traces.tracer import Program, Tracer
from budgetfit.tracing.recording.raw_trace import RawTrace
from budgetfit.workload.workload import Workload
from tests import models
from tests.models import MIB, Mebi, text

SETTING = TrainingSettings(precision="fp32", optimizer="sgd")


def budget(mib: int, host_mib: int | None = None) -> Budget:
    host = None if host_mib is None else host_mib * MIB
    found = Budget(total_bytes=mib * MIB, context_bytes=0, headroom_bytes=0)
    return replace(found, host_ram_bytes=host)


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Eight blocks; a sample is 1 MiB, and so is each block's input."""
    made = Workload(
        model=Mebi(8), batch=torch.zeros(2, 512, 512), gpu=find_gpu("rtx-4090")
    )
    return made.with_found_blocks()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Which recipes were judged."""
    recipes: list[Recipe] = []

    judge = PlanningSession.judge

    def spy(session: PlanningSession, recipe: Recipe) -> Estimate:
        recipes.append(recipe)
        return judge(session, recipe)

    monkeypatch.setattr(PlanningSession, "judge", spy)
    return recipes


def session(
    workload: Workload,
    budget: Budget,
    settings: TrainingSettings = SETTING,
    **request: Any,
) -> PlanningSession:
    chain = BlockChain(TraceSession(workload), settings)
    return PlanningSession(chain, Request(budget=budget, **request))


@pytest.mark.parametrize("host_mib", [0, 3, 64])
def test_the_least_is_below_every_usual_practice_and_within_the_host(
    workload: Workload, host_mib: int, tried: list[Recipe]
) -> None:
    settings = replace(SETTING, host_ram_bytes=host_mib * MIB)
    nothing_fits = session(workload, budget(1, host_mib), settings)
    least = lowest_judged(nothing_fits)
    for segments in ((), checkpoint_every_block(workload.blocks)):
        usual = nothing_fits.judge(settings.recipe(1, segments))
        assert least.reserved_bytes <= usual.reserved_bytes
    for recipe in tried:
        host_bytes = chain_host_bytes(
            nothing_fits.block_chain.profile_at(1), recipe.segments
        )
        assert host_bytes <= host_mib * MIB
    on_host = [
        recipe
        for recipe in tried
        if recipe.segments and all(row.input_on_host for row in recipe.segments)
    ]
    assert bool(on_host) == (host_mib > 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_of_equal_peaks_the_simplest_comes_first_and_then_what_pins_least(
    workload: Workload, tried: list[Recipe], optimizer: str
) -> None:
    # With AdamW all peak in its step.
    settings = replace(SETTING, optimizer=optimizer)
    asked = session(workload, budget(1), settings)
    lowest_judged(asked)
    chain = asked.block_chain.profile_at(1)
    peaks = [chain_peak_bytes(chain, recipe.segments) for recipe in tried]
    step = round(min(peaks) * lowest_peak.SIMILAR_PEAK)
    kinds = [
        len(
            {
                (x.mode, x.nested, x.input_on_host, x.saved_ops, len(x.blocks))
                for x in recipe.segments
            }
        )
        for recipe in tried
    ]
    hosts = [chain_host_bytes(chain, recipe.segments) for recipe in tried]
    keys = [(a // step, b, c) for a, b, c in zip(peaks, kinds, hosts, strict=True)]
    assert len(keys) > 2
    assert keys == sorted(keys)


def test_one_large_micro_batch_may_need_less_than_several_of_one_sample() -> None:
    """A gradient beside the one that it is added to outweighs a second sample."""
    layers = (nn.Linear(2048, 2048) for _ in range(3))
    workload = Workload(
        model=nn.Sequential(*layers),
        batch=torch.zeros(2, 2048),
        loss=models.mean,
        gpu=find_gpu("rtx-4090"),
    ).with_found_blocks()
    settings = replace(SETTING, effective_batch_size=2)
    asked = session(workload, budget(1), settings)
    whole, several = (asked.judge(settings.recipe(size)) for size in (2, 1))
    assert whole.reserved_bytes < several.reserved_bytes
    assert lowest_judged(asked).reserved_bytes <= whole.reserved_bytes
    fits = asked.asking(budget=budget(whole.reserved_bytes // MIB))
    assert fitting_or_lowest(fits).fits
    assert lowest_judged(fits).recipe.gradient_accumulation_steps == 1


def test_what_the_formula_rules_out_is_not_judged(
    workload: Workload, tried: list[Recipe]
) -> None:
    asked = session(workload, budget(1), batch_size=64)
    full = asked.judge(SETTING.recipe(64, checkpoint_every_block(workload.blocks)))
    tried.clear()
    above = full.timeline.floor_bytes // MIB + 1
    least = fitting_or_lowest(asked.asking(budget=budget(above)))
    assert not least.fits
    assert least.estimate is None
    assert least.needed_bytes > above * MIB
    assert len(tried) == 1  # every block recomputed, which tells the floor


def test_the_first_that_fits_ends_the_search(
    workload: Workload, tried: list[Recipe]
) -> None:
    least = fitting_or_lowest(session(workload, budget(200)))
    assert least.fits
    assert least.estimate is not None
    assert least.needed_bytes == least.estimate.reserved_bytes
    assert len(tried) == 1


def test_of_those_that_are_judged_the_first_that_fits_is_the_last(
    workload: Workload, tried: list[Recipe]
) -> None:
    nothing_fits = session(workload, budget(1))
    least = lowest_judged(nothing_fits)
    all_of_them = list(tried)
    tried.clear()
    enough = replace(budget(1), total_bytes=least.reserved_bytes)
    found = lowest_judged(nothing_fits.asking(budget=enough))
    assert found.fits
    assert tried[-1] == found.recipe
    assert tried == all_of_them[: len(tried)]
    assert len(tried) < len(all_of_them)


def test_what_would_fit_is_traced_at_one_batch_size(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("traced at two batch sizes")

    monkeypatch.setattr(TraceSession, "affine", refuse)
    traced: list[Program] = []
    trace = Tracer.trace

    def spy(tracer: Tracer, program: Program, *args: Any, **options: Any) -> RawTrace:
        traced.append(program)
        return trace(tracer, program, *args, **options)

    monkeypatch.setattr(Tracer, "trace", spy)
    least = lowest_peak_plan(
        workload, Request(budget=budget(10_000)), precisions=("fp32",), optimizer="sgd"
    )
    assert least.fits
    assert all(program.segments for program in traced)  # what is kept says no more


def test_nor_is_more_where_it_does_not_fit_with_every_block_recomputed(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTING, effective_batch_size=4)
    asked = session(workload, budget(10_000), settings)
    full = asked.judge(settings.recipe(1, checkpoint_every_block(workload.blocks)))
    too_little = replace(asked.budget, total_bytes=full.reserved_bytes - MIB)
    expected = lowest_judged(asked.asking(budget=too_little))

    def refuse(*_: object) -> None:
        raise AssertionError("traced at two batch sizes")

    monkeypatch.setattr(TraceSession, "affine", refuse)
    found = fitting_or_lowest(session(workload, too_little, settings))
    assert found.fits == expected.fits
    assert found.needed_bytes == expected.reserved_bytes


def test_depth_is_checked_once_for_several_plans(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a forward in full depth, and a model one period deeper."""
    forwards: list[int] = []
    depths: dict[str, set[int]] = defaultdict(set)
    first_forward, trace = Tracer.first_forward, Tracer.trace

    def spy(tracer: Tracer, program: Program, batch_size: int) -> RawTrace:
        forwards.append(batch_size)
        return first_forward(tracer, program, batch_size)

    def spy_on_depth(
        tracer: Tracer, program: Program, size: int, short: Any = None, **options: Any
    ) -> RawTrace:
        depths[tracer.workload.gpu.name].add(len(short.short_blocks))
        return trace(tracer, program, size, short, **options)

    monkeypatch.setattr(Tracer, "first_forward", spy)
    monkeypatch.setattr(Tracer, "trace", spy_on_depth)
    checks = DepthChecks()
    for gpu in ("rtx-4090", "h100-80gb"):
        there = replace(workload, gpu=find_gpu(gpu))
        settings = {"precisions": ("fp32",), "optimizer": "sgd", "depth_checks": checks}
        asked = Request(budget=budget(10_000))
        assert lowest_peak_plan(there, asked, **settings).fits
    assert forwards == [1]
    assert [len(found) for found in depths.values()] == [2, 1]


def test_loading_that_is_too_much_is_known_from_the_first_trace(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = session(workload, budget(1000))
    assert asked.may_fit
    kept = asked.block_chain.all_kept(1)
    # A temporary, before anything else, with which loading takes 1000 MiB and more.
    temporary = len(kept.fixed_bytes) + 1
    for mib, fits in ((1000, True), (1001, False)):
        rows = {
            name: np.append(getattr(kept, name), value)
            for name, value in (
                ("fixed_bytes", mib * MIB),
                ("bytes_per_sample", 0),
                ("category", 0),
                ("layer", -1),
                ("scratch_index", -1),
            )
        }
        events = temporary, -temporary, EMPTY_CACHE
        setup = kept.events[: kept.phases[0].end].tolist()
        loading = replace(kept, **rows).with_setup_events((*events, *setup))
        monkeypatch.setattr(BlockChain, "all_kept", lambda *_, made=loading: made)
        assert replace(asked).may_fit == fits


def test_where_loading_does_not_fit_the_lowest_of_long_traces_is_judged_alone(
    workload: Workload, tried: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowest_peak, "MAX_EVENTS_PROVEN", 0)
    least = lowest_judged(session(workload, budget(1)))
    enough = budget(least.timeline.floor_bytes // MIB + 1)  # but for the loading
    tried.clear()
    monkeypatch.setattr(PlanningSession, "setup_fits", False)
    assert not lowest_judged(session(workload, enough)).fits
    alone = checkpoint_every_block(workload.blocks)
    on_host = tuple(replace(row, input_on_host=True) for row in alone)
    assert {recipe.segments for recipe in tried} == {alone, on_host}


def test_of_a_base_that_cannot_be_loaded_one_recipe_is_judged(
    workload: Workload, tried: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = session(workload, budget(1))
    floor_bytes = lowest_judged(tight).timeline.floor_bytes
    tight = tight.asking(budget=replace(tight.budget, total_bytes=floor_bytes + 1))
    for loads in (True, False):
        monkeypatch.setattr(PlanningSession, "base_loads", loads)
        tried.clear()
        assert not fitting_or_lowest(tight).fits
        assert (len(tried) > 1) == loads


def test_every_input_on_the_host_is_tried_before_the_formula(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = session(workload, budget(1000), batch_size=4)
    alone = checkpoint_every_block(workload.blocks)
    on_host = tuple(replace(row, input_on_host=True) for row in alone)
    full, least = (asked.judge(SETTING.recipe(4, x)) for x in (alone, on_host))
    assert least.reserved_bytes < full.reserved_bytes

    def refuse(*_: object) -> None:
        raise AssertionError("the formula was asked")

    monkeypatch.setattr(lowest_peak, "_lowest_by_formula", refuse)
    just = replace(asked.budget, total_bytes=full.reserved_bytes - MIB)
    found = fitting_or_lowest(asked.asking(budget=just))
    assert found.fits
    assert found.estimate is not None
    assert found.estimate.recipe.segments == on_host
    monkeypatch.setattr(lowest_peak, "FAR_ABOVE", 0.5)
    with pytest.raises(AssertionError, match="the formula was asked"):
        fitting_or_lowest(asked.asking(budget=just))


def test_what_is_above_by_a_formula_that_was_checked_is_not_judged(
    workload: Workload, tried: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = session(workload, budget(1000))
    chain = asked.block_chain.profile_at(1)
    rated = lowest_peak._lowest_by_formula(asked)
    live = min(chain_peak_bytes(chain, row.recipe.segments) for row in rated)
    by_formula = lowest_peak.chain_peak_bytes
    few, several = lowest_peak.MAX_JUDGED_PROVEN, lowest_peak.MAX_JUDGED
    # Above what is usable by so much; the formula says so much too much.
    for above, error, judged, shown in (
        (1.02, 1.0, 0, few),
        (1.005, 1.0, several, several),
        (1.03, 1.05, several, several),
    ):
        monkeypatch.setattr(
            lowest_peak,
            "chain_peak_bytes",
            lambda *row, error=error: round(by_formula(*row) * error),
        )
        near = replace(asked.budget, total_bytes=round(live / above))
        tight = session(workload, near)
        tried.clear()
        usual = list(lowest_peak._full_checkpointing(tight))
        tried.clear()
        assert not fitting_or_lowest(tight).fits
        assert len(tried) - len(usual) == judged or len(tried) > judged > 0
        monkeypatch.setattr(lowest_peak, "MAX_EVENTS_PROVEN", 0)
        tried.clear()
        lowest_judged(tight)
        assert len(tried) == shown or len(tried) > shown > few


def test_where_nothing_fits_for_sure_the_lowest_of_long_traces_is_judged_alone(
    workload: Workload, tried: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = session(workload, budget(1))
    first = lowest_judged(asked)
    several = len(tried)
    assert several > 1
    monkeypatch.setattr(lowest_peak, "MAX_EVENTS_PROVEN", 0)
    monkeypatch.setattr(PlanningSession, "may_fit", True)
    tried.clear()
    assert lowest_judged(asked).recipe == tried[0]
    assert len(tried) == 1
    assert first.timeline.floor_bytes > asked.budget.usable_bytes


@pytest.mark.parametrize("host_mib", [0, 64])
def test_of_long_traces_no_other_blocks_are_judged_where_no_plan_can_fit(
    workload: Workload,
    host_mib: int,
    tried: list[Recipe],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lowest_peak, "MAX_EVENTS_PROVEN", 0)
    asked = session(workload, budget(1, host_mib))
    least = lowest_judged(asked)
    assert least.timeline.floor_bytes > asked.budget.usable_bytes
    every = checkpoint_every_block(workload.blocks)
    on_host = tuple(replace(row, input_on_host=True) for row in every)
    expected = {every, on_host} if host_mib else {every}
    assert {recipe.segments for recipe in tried} == expected
    assert least.reserved_bytes == min(
        judged.reserved_bytes
        for judged in map(asked.judge, list(tried))
        if judged.host_bytes <= host_mib * MIB
    )
    tried.clear()
    enough = replace(budget(1), total_bytes=least.timeline.floor_bytes + 1)
    lowest_judged(asked.asking(budget=enough))  # not proven
    assert len(tried) > 1


def test_a_chunked_loss_is_tried_before_anything_is_solved(tried: list[Recipe]) -> None:
    made = Workload(
        model=models.gpt2(n_layer=2, vocab_size=20_000),
        batch=text(),
        gpu=find_gpu("rtx-4090"),
    ).with_found_blocks()
    asked = session(made, budget(100_000), batch_size=64)
    recompute_all = checkpoint_every_block(made.blocks)
    whole, chunked = (
        asked.judge(replace(SETTING.recipe(64, recompute_all), loss_chunks=chunks))
        for chunks in (1, LOSS_CHUNKS[0])
    )
    assert chunked.reserved_bytes < whole.reserved_bytes
    tried.clear()
    enough = replace(budget(1), total_bytes=chunked.reserved_bytes)
    least = fitting_or_lowest(asked.asking(budget=enough))
    assert least.fits
    assert [recipe.loss_chunks for recipe in tried] == [1, LOSS_CHUNKS[0]]


def test_the_sizes_of_a_chunked_loss_take_no_trace_with_blocks_kept() -> None:
    """What is measured of it is its trace with every block recomputed."""
    made = Workload(
        model=models.gpt2(n_layer=2), batch=text(), gpu=find_gpu("rtx-4090")
    )
    asked = session(made.with_found_blocks(), budget(100_000))
    trace = Tracer.trace
    with mock.patch.object(Tracer, "trace", autospec=True, side_effect=trace) as traced:
        for each in with_more_loss_chunks(asked)[:2]:
            assert each.largest_searched == LARGEST_BATCH_SIZE
            assert each.smallest_searched == 1
            each.block_chain.profile_at(8, exact_blocks=False)
    programs = [call.args[1] for call in traced.call_args_list]
    segments = {program.segments for program in programs if program.loss_chunks > 1}
    assert segments == {checkpoint_every_block(asked.workload.blocks)}


def test_setup_and_optimizer_step_are_what_no_segments_change() -> None:
    def timeline(*points: tuple[str, int, int]) -> MemoryTimeline:
        return MemoryTimeline(
            points=tuple(
                TimelinePoint(
                    step=0,
                    micro_step=0,
                    phase=phase,
                    block="",
                    allocated_bytes=allocated,
                    reserved_bytes=reserved,
                )
                for phase, allocated, reserved in points
            ),
            allocated_bytes=0,
            reserved_bytes=0,
            at_peak_bytes={},
        )

    passes = (("forward", 50, 60), ("backward", 90, 99))
    # What is reserved in the optimizer step was reserved for the passes before it, and
    # what loading leaves cached the allocator gives back where memory runs out.
    assert timeline(*passes, ("optimizer", 40, 99)).floor_bytes == 40
    converting = (("setup", 70, 80), *passes, ("optimizer", 40, 99))
    assert timeline(*converting).floor_bytes == 70


def test_a_near_miss_is_looked_at_longer(
    workload: Workload, tried: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowest_peak, "FAR_ABOVE", math.inf)
    monkeypatch.setattr(lowest_peak, "MAX_EVENTS", 0)
    far_mib = 1
    least = lowest_judged(session(workload, budget(far_mib)))
    in_short = len(tried)
    assert in_short == lowest_peak.MAX_JUDGED
    tried.clear()
    near_mib = least.reserved_bytes // MIB - 1
    lowest_judged(session(workload, budget(near_mib)))
    assert len(tried) > in_short


def test_what_is_far_above_the_limit_is_looked_at_briefly(
    workload: Workload, tried: list[Recipe]
) -> None:
    least = lowest_judged(session(workload, budget(1)))
    assert len(tried) == lowest_peak.MAX_JUDGED
    tried.clear()
    above_mib = round(least.reserved_bytes / lowest_peak.FAR_ABOVE / MIB) + 1
    longer = lowest_judged(session(workload, budget(above_mib)))
    assert longer.reserved_bytes <= least.reserved_bytes
    assert len(tried) > lowest_peak.MAX_JUDGED


def test_one_block_treated_differently_is_tried_while_traces_are_short(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tensor that is alive somewhere else may save the allocator a segment.
    def shapes() -> Counter[tuple[int, ...]]:
        """Count plans by the lengths of their segments, of inputs on the host by -1."""
        tried = lowest_peak._segments_to_try(session(workload, budget(1)))
        return Counter(
            tuple(sorted(-1 if row.input_on_host else len(row.blocks) for row in plan))
            for plan in tried
        )

    one_on_gpu = (*(-1,) * 7, 1)
    found = shapes()
    assert found[one_on_gpu] == 8  # any of the eight
    assert found[*(1,) * 6, 2] == 7
    assert found[*(1,) * 5, 3] == 6
    monkeypatch.setattr(lowest_peak, "MAX_EVENTS", 0)
    assert one_on_gpu not in shapes()


def test_every_choice_of_options_is_tried_for_a_few_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is live with more may reserve less: no formula says which."""
    model = Mebi(3)
    small = Workload(model=model, batch=torch.zeros(2, 512, 512), gpu=find_gpu("t4"))
    small_session = session(small.with_found_blocks(), budget(1))
    segments_to_try = lowest_peak._segments_to_try
    tried = {frozenset(each) for each in segments_to_try(small_session)}
    blocks = small_session.block_chain.profile_at(1).blocks
    expected = math.prod(len(block.options) for block in blocks)
    single = {plan for plan in tried if all(len(row.blocks) == 1 for row in plan)}
    assert len(single) == expected > 3**3
    monkeypatch.setattr(lowest_peak, "MAX_MIXTURES", expected - 1)
    assert len(segments_to_try(small_session)) < expected / 2


def test_no_more_chunks_of_the_loss_are_taken_than_a_plan_needs_to_fit() -> None:
    """Each chunk launches as many kernels: 64 take 1.5 times as long here as 16."""
    made = Workload(
        model=models.gpt2(n_layer=2, n_embd=128, n_positions=2048, vocab_size=16384),
        batch=text(2, 2048),
        gpu=find_gpu("t4"),
    ).with_found_blocks()
    found = search_with_loss_chunks(session(made, budget(110), batch_size=1)).estimate
    assert found is not None
    assert found.recipe.loss_chunks == 16


def _nothing_found(session: PlanningSession) -> SearchResult:
    return SearchResult(session=session, estimate=None)


def test_what_fits_with_more_chunks_alone_is_searched_with_as_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 chunks leave little to gain, and yet with them nothing may fit."""
    made = Workload(
        model=models.gpt2(n_positions=256, vocab_size=8192),
        batch=text(2, 256),
        gpu=find_gpu("rtx-4090"),
    ).with_found_blocks()
    roomy = session(made, budget(4096))
    in_parts = with_more_loss_chunks(roomy)[2]
    nested = (Segment(made.blocks, nested=True),)
    lowest = in_parts.judge(in_parts.settings.recipe(1, nested))
    faster = faster_than_lowest(roomy, lowest).estimate
    assert faster is not None
    assert faster.recipe == replace(lowest.recipe, segments=())  # all is kept
    nothing_else = roomy.asking(budget=budget(1))
    assert faster_than_lowest(nothing_else, lowest).estimate == lowest
    monkeypatch.setattr(best_settings, "lowest_judged", lambda _: lowest)
    monkeypatch.setattr(best_settings, "search_with_loss_chunks", _nothing_found)
    planned = best_settings.best_found([roomy])
    assert isinstance(planned, SearchResult)
    assert planned.estimate == faster
    assert planned.explanation
