"""Plans of a model whose tensors are whole MiB."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from budgetfit.core.budget import Budget
from budgetfit.core.plan import Plan
from budgetfit.core.recipe import Recipe
from budgetfit.errors import DoesNotFitError, InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.replay import replay
from budgetfit.planning.judge import judge
from budgetfit.planning.planner import make_layers, make_plan, policy_recipe
from budgetfit.planning.profiling.block_chain import (
    BlockChain,
    TrainingSettings,
    checkpoint_every_block,
)
from budgetfit.planning.search.policies import fixed_segments
from budgetfit.planning.search.search import search
from budgetfit.planning.session import PlanningSession, Request, rank
from budgetfit.traces.cache.folder import CACHE_VARIABLE
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.models import EXAMPLES, MIB, Mebi
from tests.traced import ROOMY

pytestmark = pytest.mark.usefixtures("kept_traces")
ADA = find_gpu("rtx-4090")
BLOCKS = tuple(f"blocks.{index}" for index in range(6))
FP32 = TrainingSettings(precision="fp32", optimizer="adamw_torch_fused")
SETTINGS: dict[str, Any] = {"precisions": ["fp32"], "optimizer": "adamw_torch_fused"}


def budget(mib: int) -> Budget:
    return Budget(total_bytes=mib * MIB, context_bytes=0, headroom_bytes=0)


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Six blocks of x + tanh(x W); a sample is 1 MiB, and so is W."""
    found = Workload(model=Mebi(6), batch=torch.zeros(2, 512, 512), gpu=ADA)
    return found.with_found_blocks()


def plan(workload: Workload, request: Request, **options: Any) -> Plan:
    """Return a plan; those without options are made once for all tests."""
    if not options:
        return _plain_plan(workload.model, request)
    return make_plan(workload, request, **{**SETTINGS, **options})


@functools.cache
def _plain_plan(model: nn.Module, request: Request) -> Plan:
    found = Workload(model=model, batch=torch.zeros(2, 512, 512), gpu=ADA)
    return make_plan(found.with_found_blocks(), request, **SETTINGS)


def test_a_plan_that_is_recommended_fits_by_the_judge(workload: Workload) -> None:
    found = plan(workload, Request(budget=budget(400)))
    assert found.fits
    assert found.estimate.reserved_bytes <= 400 * MIB
    trace = TraceSession(workload).exact(found.recipe)
    again = replay(trace, found.recipe.batch_size, ADA, limit_bytes=400 * MIB)
    assert again.failed_bytes is None
    assert again.retries == 0
    assert again.allocated_bytes == found.estimate.allocated_bytes
    assert again.reserved_bytes == found.estimate.reserved_bytes


@pytest.mark.parametrize("objective", ["throughput", "batch_size", "memory"])
def test_no_usual_practice_beats_the_plan(workload: Workload, objective: Any) -> None:
    for mib in (90, 400):
        found = plan(workload, Request(budget=budget(mib), objective=objective))
        ours = rank(found.estimate, objective)
        for row in found.alternatives:
            comparable = row.fits and not row.is_suggestion
            assert not comparable or ours <= rank(row.estimate, objective), row.label


def test_updates_in_the_backward_are_not_told_to_take_smaller_batches(
    workload: Workload,
) -> None:
    request = Request(budget=budget(120), batch_size=16, checkpointing="none")
    with pytest.raises(DoesNotFitError) as caught:
        plan(workload, request, optimizer_in_backward=True)
    told = [row.arguments for row in caught.value.suggestions]
    assert told
    assert {"batch_size": 1} not in told


def test_host_memory_that_is_missing_is_said_and_suggested(workload: Workload) -> None:
    limited = replace(budget(2000), host_ram_bytes=MIB)
    settings = {**SETTINGS, "optimizer": "adamw_torch_cpu_offload"}
    request = Request(budget=limited, batch_size=1, checkpointing="none")
    with pytest.raises(DoesNotFitError, match="host memory are needed") as caught:
        make_plan(workload, request, **settings)
    error = caught.value
    assert error.needed_bytes < error.usable_bytes
    assert error.host_ram_bytes == MIB < error.host_bytes
    assert "1 MiB are allowed (host_ram=, --host-ram)" in str(error)
    more = [row for row in error.suggestions if "host_ram" in row.arguments]
    assert [row.arguments for row in more] == [{"host_ram": "1GiB"}]
    again = error.with_suggestions(())
    assert str(again).splitlines()[0] == str(error).splitlines()[0]


def test_progress_is_told_step_by_step(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    said: list[str] = []
    plan(workload, Request(budget=budget(400), batch_size=4), progress=said.append)
    assert said[0].startswith("tracing batch 2")
    assert said[-1] != said[0]


class SharedBlock(nn.Module):
    """Runs its first block twice and its third never."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mebi.Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 0, 1, 3):
            x = self.blocks[index](x)
        return x


def test_blocks_that_do_not_run_exactly_once_are_left_alone() -> None:
    shared = Workload(model=SharedBlock(), batch=torch.zeros(2, 512, 512), gpu=ADA)
    request = Request(budget=budget(400), batch_size=4, checkpointing="full")
    found = plan(shared.with_found_blocks(), request)
    assert found.recipe.segments == checkpoint_every_block(("blocks.1", "blocks.3"))
    assert any("2 of 4 blocks" in text for text in found.warnings)


def test_a_model_without_blocks_is_planned_by_its_batch_alone() -> None:
    flat = Workload(model=nn.Linear(512, 512), batch=torch.zeros(2, 512, 512), gpu=ADA)
    request = Request(budget=budget(200), objective="batch_size")
    found = plan(flat.with_found_blocks(), request)
    assert found.recipe.segments == ()
    assert found.recipe.batch_size > 8
    practices = {"every block recomputed", "Chen's sqrt(n) segments"}
    assert practices.isdisjoint(row.label for row in found.alternatives)


def test_a_policy_becomes_a_recipe_where_nothing_is_left_to_solve(
    workload: Workload,
) -> None:
    assert policy_recipe(workload, "full", FP32, 4).segments == checkpoint_every_block(
        BLOCKS
    )
    assert policy_recipe(workload, "as-is", FP32, 4).segments == ()
    assert policy_recipe(workload, "sqrt", FP32, 4).segments
    with pytest.raises(InputError, match="'auto' is a decision"):
        policy_recipe(workload, "auto", FP32, 4)


def test_policies_and_blocks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="'half' is not a checkpointing policy"):
        fixed_segments("half", BLOCKS)
    with pytest.raises(InputError, match=r"'blocks\.7' is not a block of this model"):
        fixed_segments(("blocks.0", "blocks.7"), BLOCKS)


def test_a_search_under_an_impossible_budget_finds_nothing(workload: Workload) -> None:
    chain = BlockChain(TraceSession(workload), FP32)
    assert search(PlanningSession(chain, Request(budget=budget(10)))).estimate is None


def test_a_recipe_that_only_retries_make_fit_does_not_fit(workload: Workload) -> None:
    # Between the most that is alive and the most that is reserved, the allocator
    # empties its cache to go on (memory-model A4).
    recipe = Recipe(batch_size=16)
    trace = TraceSession(workload).exact(recipe)
    free = judge(trace, recipe, ADA, ROOMY, context_bytes=0)
    assert free.allocated_bytes < free.reserved_bytes
    tight = Budget(
        total_bytes=free.reserved_bytes - 1, context_bytes=0, headroom_bytes=0
    )
    assert judge(trace, recipe, ADA, tight, context_bytes=0).fits is False
    enough = Budget(total_bytes=free.reserved_bytes, context_bytes=0, headroom_bytes=0)
    assert judge(trace, recipe, ADA, enough, context_bytes=0).fits is True


def test_layers_are_the_blocks_and_what_lies_beside_them(workload: Workload) -> None:
    rows = make_layers(workload, ["fp32", "bf16-mixed", "bf16"])
    assert [row.name for row in rows] == list(BLOCKS)
    for row in rows:
        assert row.type == "Block"
        assert row.parameter_count == 512 * 512
        assert row.recompute_flops_per_sample == 2 * 512**3
    inner = rows[1].by_precision
    assert inner["fp32"].weight_bytes == inner["bf16-mixed"].weight_bytes == MIB
    assert inner["bf16"].weight_bytes == MIB // 2
    # tanh, and the sum that the next block takes; in bf16 half of both.
    assert inner["fp32"].saved_bytes_per_sample == 2 * MIB
    assert inner["bf16"].saved_bytes_per_sample == MIB


def test_what_is_no_block_has_a_row_of_its_own() -> None:
    example = EXAMPLES["gpt2"]
    found = Workload(model=example.model(), batch=example.batch, gpu=ADA)
    rows = make_layers(found.with_found_blocks(), ["fp32"])
    names = [row.name for row in rows]
    assert "transformer.wte" in names
    assert names.count("transformer.h.1") == 1
    assert not any(name.startswith("transformer.h.1.") for name in names)
    counted = sum(row.parameter_count for row in rows if row.name != "lm_head")
    assert counted == sum(p.numel() for p in found.model.parameters())  # tied once
