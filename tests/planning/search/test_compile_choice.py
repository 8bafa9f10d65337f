"""With and without compiled blocks: the row of a plan, and ``compile="auto"``."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config

import budgetfit
from budgetfit.api.compare import compare
from budgetfit.core.budget import Budget
from budgetfit.core.plan import Estimate
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.alternatives.alternatives import (
    compiled_row,
    with_compiled_blocks,
)
from budgetfit.planning.compile_choice import best_compiled
from budgetfit.planning.profiling.block_chain import (
    BlockChain,
    TrainingSettings,
    checkpoint_every_block,
)
from budgetfit.planning.search import compiled_model
from budgetfit.planning.search.compiled_model import (
    SIZES_JUDGED,
    judge_sizes,
    search_compiled_model,
)
from budgetfit.planning.search.policies import fixed_segments
from budgetfit.planning.session import PlanningSession, Request
from budgetfit.solvers.batch_size_grid import LARGEST_TRACED_SIZE, batch_size_grid
from budgetfit.traces.session import TraceSession
from budgetfit.traces.tracer import COMPILED_BATCH_SIZES
from budgetfit.tracing.compiled.cuda_backend import CHECKED_TORCH
from budgetfit.tracing.cuda.target import installed_torch_version
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi

supported = pytest.mark.skipif(
    installed_torch_version() not in CHECKED_TORCH or sys.platform != "linux",
    reason="compiled blocks are predicted for other versions of torch",
)
PLANNED = Recipe(batch_size=8, segments=(Segment(("blocks.0",)),))


@functools.cache
def session(gpu: str = "rtx-4090", blocks: int = 3) -> PlanningSession:
    workload = Workload(
        model=Mebi(blocks), batch=torch.zeros(2, 512, 512), gpu=find_gpu(gpu)
    ).with_found_blocks()
    settings = TrainingSettings(precision="fp32", optimizer="adamw_torch_fused")
    budget = Budget(total_bytes=200 * MIB, context_bytes=0, headroom_bytes=0)
    return PlanningSession(
        BlockChain(TraceSession(workload), settings), Request(budget=budget)
    )


def planned(recipe: Recipe = PLANNED) -> Estimate:
    blocks = session().workload.blocks
    assert set(recipe.wrapped_blocks) <= set(blocks)
    return session().judge(recipe)


@supported
def test_the_row_is_the_plans_recipe_compiled_and_judged() -> None:
    name = session().workload.blocks[0]
    plan = planned(Recipe(batch_size=8, segments=(Segment((name,)),)))
    (row,) = compiled_row(session(), plan)
    assert row.estimate.recipe == with_compiled_blocks(plan.recipe)
    assert row.estimate == session().judge(row.estimate.recipe)
    assert row.is_suggestion
    assert 'compile="blocks"' in row.note
    assert not compiled_row(session(), row.estimate)


def test_there_is_no_row_where_it_cannot_be_predicted() -> None:
    plan = planned(Recipe(batch_size=8))
    assert not compiled_row(session("gtx-1080"), plan)
    assert "is not shown" in session("gtx-1080").traces.log[-1]


def test_blocks_that_save_selectively_are_recomputed() -> None:
    first = Segment(("blocks.0",), "selective", saved_ops=("aten.mm.default:0",))
    rest = Segment(("blocks.1",), "offload"), Segment(("blocks.2", "blocks.3"))
    found = with_compiled_blocks(Recipe(batch_size=8, segments=(first, *rest)))
    assert found.segments == (Segment(("blocks.0",)), *rest)
    assert found.compile == "blocks"


class Planned(SimpleNamespace):
    """As much of a plan as the choice looks at."""

    def changed(self, **changes: Any) -> Planned:
        return Planned(**{**vars(self), **changes})


def of(step_ms: float, reserved: int) -> Planned:
    recipe = Recipe(batch_size=4)
    estimate = SimpleNamespace(
        recipe=recipe,
        step_ms=step_ms,
        reserved_bytes=reserved,
        samples_per_s=4000 / step_ms,
    )
    return Planned(estimate=estimate, warnings=("first",))


def chosen(
    none: Planned | Exception,
    blocks: Planned | Exception,
    objective: Any = "throughput",
) -> Any:
    def plan(mode: str) -> Any:
        made = {"none": none, "blocks": blocks}[mode]
        if isinstance(made, Exception):
            raise made
        return made

    return best_compiled(("none", "blocks"), plan, objective)


def test_the_better_is_taken_and_both_are_said() -> None:
    eager, compiled = of(20, 2 * MIB), of(10, 3 * MIB)
    fastest = chosen(eager, compiled)
    assert fastest.estimate is compiled.estimate
    note, first = fastest.warnings
    assert first == "first"
    for text in ("'blocks'", "200 samples/s", "400 samples/s", "2 MiB"):
        assert text in note
    lowest = chosen(eager, compiled, "memory")
    assert lowest.estimate is eager.estimate


def test_what_cannot_be_planned_is_not_taken() -> None:
    made = of(10, MIB)
    compiled = chosen(InputError("it does not run.\nmore"), made)
    assert compiled.estimate is made.estimate
    assert "none: it does not run;" in compiled.warnings[0]
    eager = chosen(made, InputError("needs Triton."))
    assert eager.estimate is made.estimate
    assert eager.warnings[0].endswith("blocks: needs Triton")
    with pytest.raises(InputError, match="the first"):
        chosen(InputError("the first"), InputError("the second"))


@supported
def test_only_what_may_be_the_plan_is_compiled_for_its_batch_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BUDGETFIT_CACHE", "off")
    asked: Any = {"vram": "1000MiB", "gpu": "rtx-4090", "precision": "fp32"}
    model, given = Mebi(3), torch.zeros(2, 512, 512)
    plan = budgetfit.plan(model, compile="blocks", batch=given, **asked)
    recipe, searched = plan.recipe, COMPILED_BATCH_SIZES[0]
    assert not recipe.segments  # found at two sizes, and judged at its own
    text = "\n".join(map(str, plan.provenance["traces"]))
    sizes = {int(size) for size in re.findall(r"traced fp32 at batch (\d+)", text)}
    assert sizes == {*searched, recipe.batch_size}
    labels = {row.label for row in plan.judged_alternatives}
    assert "everything kept" in labels
    assert "every block recomputed" not in labels  # compiled when it is looked at
    assert "every block recomputed" in {row.label for row in plan.alternatives}


@supported
def test_auto_is_the_better_of_both_plans() -> None:
    model, given = Mebi(3), torch.zeros(2, 512, 512)
    asked: Any = {"vram": "800MiB", "gpu": "rtx-4090", "batch": given}
    asked |= {"batch_size": 4, "checkpointing": "none"}
    both = [
        budgetfit.plan(model, **asked, compile=mode, headroom=0)
        for mode in ("none", "blocks")
    ]
    best = min(both, key=lambda plan: plan.estimate.step_ms)
    auto = budgetfit.plan(model, **asked, compile="auto", headroom=0)
    assert auto.recipe == best.recipe
    assert auto.warnings[0].startswith(f"compile='auto' chose {best.recipe.compile!r}")


def test_auto_is_no_recipe_and_no_comparison_of_cards() -> None:
    allowed = "compile must be one of: none, blocks, model"
    with pytest.raises(InputError, match=allowed):
        Recipe(batch_size=1, compile="auto")  # type: ignore[arg-type]
    for mode in ("auto", "blocks", "model"):
        with pytest.raises(InputError, match="for one card at a time"):
            compare(Mebi(1), ["t4"], compile=mode)
    with pytest.raises(InputError, match="gpu='l4' is one card, and compare takes"):
        compare(Mebi(1), ["t4"], gpu="l4")
    with pytest.raises(InputError, match=f"{allowed}, auto; got 'all'"):
        budgetfit.plan(Mebi(1), "1GB", compile="all")


@supported
def test_a_compiled_model_keeps_everything_or_recomputes_until_it_fits() -> None:
    asked: Any = {"gpu": "rtx-4090", "batch": torch.zeros(2, 512, 512), "headroom": 0}
    asked |= {"batch_size": 8, "effective_batch_size": 8, "compile": "model"}
    kept = budgetfit.plan(Mebi(2), "2GiB", **asked)
    assert not kept.recipe.segments
    assert kept.recipe.compile == "model"
    assert "torch.compile for the forward of the model" in str(kept)
    lowest = budgetfit.plan(Mebi(2), "2GiB", **asked, objective="memory")
    judged = lowest.provenance["solver"]
    assert judged.endswith("8 x 0, 8 x 1, 8 x 2")
    assert lowest.estimate.reserved_bytes <= kept.estimate.reserved_bytes
    with pytest.raises(budgetfit.DoesNotFitError):
        budgetfit.plan(Mebi(2), "540MiB", **asked)


@supported
def test_the_batch_size_of_a_compiled_model_is_the_largest_that_fits() -> None:
    asked: Any = {"gpu": "rtx-4090", "batch": torch.zeros(2, 512, 512), "headroom": 0}
    asked |= {"effective_batch_size": 64, "compile": "model"}
    asked |= {"checkpointing": "none", "optimizer": "sgd"}
    plan = budgetfit.plan(Mebi(2), "700MiB", **asked)
    assert 1 < plan.recipe.batch_size < 64
    larger = replace(
        plan.recipe,
        batch_size=2 * plan.recipe.batch_size,
        gradient_accumulation_steps=plan.recipe.gradient_accumulation_steps // 2,
    )
    options = {name: asked[name] for name in ("gpu", "batch", "headroom")}
    next_size = budgetfit.estimate(Mebi(2), larger, vram="700MiB", **options)
    assert plan.fits
    assert not next_size.fits


@pytest.mark.parametrize("per_sample", [0.1, 3, 40, 700, 5000])
@pytest.mark.parametrize("curved", [0, 0.05, -0.0001])
def test_few_sizes_are_judged_and_the_largest_that_fits_is_found(
    per_sample: float, curved: float
) -> None:
    """Memory that grows by a line, or by somewhat more or less than one."""
    usable, fixed = 24_000, 4_000

    def reserved(size: int) -> int:
        return round(fixed + per_sample * size * (1 + curved * size**0.5))

    sizes = batch_size_grid(LARGEST_TRACED_SIZE)
    largest = max((size for size in sizes if reserved(size) <= usable), default=0)

    def judged_sizes(line: Any = ()) -> list[int]:
        """Return what is judged, once the largest that fits was found."""
        judged = judge_sizes(functools.partial(judge_as, reserved), sizes, usable, line)
        fitting = [each.recipe.batch_size for each in judged if each.fits]
        assert len(judged) <= SIZES_JUDGED
        assert max(fitting, default=0) >= (largest if not curved else 0.8 * largest)
        assert largest == 0 or fitting
        if not largest:
            assert judged[-1].recipe.batch_size == 1
        return [each.recipe.batch_size for each in judged]

    judged_sizes()
    for wrong in (0.5, 0.9, 1, 1.1, 2):
        known = judged_sizes([(0, fixed), (8, round(reserved(8) * wrong))])
        if wrong == 1 and not curved and largest:
            assert known == [largest]


def judge_as(reserved: Callable[[int], int], size: int) -> Any:
    """Return as much of an estimate as the search looks at."""
    return SimpleNamespace(
        recipe=SimpleNamespace(batch_size=size),
        reserved_bytes=reserved(size),
        batch_independent_bytes=reserved(0),
        fits=reserved(size) <= 24_000,
    )


@pytest.mark.parametrize(("size", "tried"), [(1, True), (256, False)])
def test_recomputing_is_tried_where_more_samples_are_faster(
    size: int, tried: bool
) -> None:
    """One sample of 1 MiB leaves a GPU idle, and 256 do not."""
    best = session().judge(session().settings.recipe(size))
    every_block = checkpoint_every_block(session().workload.blocks)
    for objective, expected in (("throughput", tried), ("batch_size", True)):
        asked = session().asking(objective=objective)
        assert compiled_model._may_be_better(asked, every_block, best) is expected


@pytest.mark.parametrize(
    ("mib", "judged"), [(2000, "40 x 0, 48 x 0"), (108, "1 x 9, 1 x 18")]
)
def test_few_recipes_are_judged(mib: int, judged: str) -> None:
    """Of a model of 18 blocks, here without torch.compile: its search is the same."""
    budget = Budget(total_bytes=mib * MIB, context_bytes=0, headroom_bytes=0)
    of_many = session(blocks=18).asking(budget=budget)
    found = search_compiled_model(of_many)
    assert found.explanation.endswith(f": {judged}")


@pytest.mark.parametrize("policy", ["none", "full", "every-2"])
def test_two_models_of_few_blocks_tell_what_all_take(policy: str) -> None:
    of_many = session.__wrapped__(blocks=18)
    recipe = of_many.settings.recipe(4, fixed_segments(policy, of_many.workload.blocks))
    # The forward of all blocks is compared for it: traces of the disk were before.
    found = of_many.traces.shortened(recipe)
    assert of_many.traces._depth_checks.compared
    assert found is not None
    *traces, lacking = found
    few, more = (of_many.judge(recipe, trace).allocated_bytes for trace in traces)
    assert more + lacking * (more - few) == of_many.judge(recipe).allocated_bytes
    assert not session().traces.shortened(recipe)  # three blocks are few


def test_the_divisors_of_a_huge_batch_are_found_at_once() -> None:
    huge = session().changed(effective_batch_size=10**18)
    sizes = compiled_model._batch_sizes(huge)
    assert sizes[-1] == LARGEST_TRACED_SIZE


def test_what_a_compiled_model_is_not_planned_for() -> None:
    batch = torch.zeros(2, 512, 512)
    asked: Any = {"vram": "2GiB", "batch": batch, "compile": "model"}
    with pytest.raises(InputError, match="looks at many lengths"):
        budgetfit.plan(GPT2Config(), "2GiB", objective="length", compile="model")
    with pytest.raises(InputError, match="needs the memory of single blocks"):
        budgetfit.plan(Mebi(1), **asked, batch_size=2, checkpointing="sqrt")


@supported
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, True),
        ({"gpu": "p100-16gb"}, False),  # Triton needs compute capability 7.0
        ({"compile": "auto"}, False),
        ({"objective": "memory"}, False),
    ],
)
def test_a_plan_says_how_to_plan_with_torch_compile(
    options: dict[str, Any], *, shown: bool
) -> None:
    asked = {"gpu": "rtx-4090", "vram": "1GB", "precision": "fp32", **options}
    plan = budgetfit.plan(Mebi(3), batch=torch.zeros(2, 512, 512), **asked)
    assert ("--compile auto" in str(plan).split("NEXT")[1]) == shown
