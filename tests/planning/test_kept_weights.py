"""FSDP2 with kept weights is left out only where it is no faster than freed ones."""

from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from budgetfit.core.budget import Budget
from budgetfit.core.parallelism import Parallelism
from budgetfit.gpus.nccl_memory import nccl_memory
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.search.kept_weights import keeping_weights_can_gain
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.search.search import SearchResult
from budgetfit.planning.session import PlanningSession, Request, open_sessions
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi
from tests.planning.test_depth_extrapolation import MIB_BATCH

FREED = Parallelism(engine="fsdp2", gpus=8)
KEPT = replace(FREED, reshard_after_forward=False)
NCCL = nccl_memory(2, 1).high_bytes
SAMPLES = 4
DDP = Parallelism(engine="ddp", gpus=8)


def sessions(usable_bytes: int, *ways: Parallelism) -> list[PlanningSession]:
    """Sessions of sixteen blocks of 50 M weights, and samples of 4,096 tokens."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        vocab_size=1000,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(1, 4096, dtype=torch.int64)
    workload = Workload(
        model=model,
        batch={"input_ids": tokens, "labels": tokens},
        gpu=find_gpu("h100-80gb"),
    )
    return open_sessions(
        workload.with_found_blocks(),
        Budget(total_bytes=usable_bytes + NCCL, context_bytes=0, headroom_bytes=0),
        Request(),
        precisions=["bf16-mixed"],
        optimizer="adamw_torch_fused",
        effective_batch_size=SAMPLES,
        parallelisms=ways,
    )


def test_where_there_is_no_room_for_all_weights_they_are_not_kept() -> None:
    """Those of fourteen blocks are 1.3 GiB in bf16."""
    freed, kept = sessions(6000 * MIB, FREED, KEPT)
    found = search_with_loss_chunks(freed)
    assert found.estimate is not None
    assert not keeping_weights_can_gain(kept, found)
    recipe = found.estimate.recipe
    same = kept.settings.recipe(recipe.batch_size, recipe.segments)
    assert not kept.judge(replace(same, loss_chunks=recipe.loss_chunks)).fits
    room = replace(freed.budget, total_bytes=2**36)
    roomy = replace(found, session=replace(freed, budget=room))
    assert keeping_weights_can_gain(kept, roomy)


def test_only_freed_weights_say_so() -> None:
    """Other engines, and sessions that do not keep weights, are searched."""
    workload = Workload(model=Mebi(6), batch=MIB_BATCH, gpu=find_gpu("t4"))
    ddp, freed, kept = open_sessions(
        workload.with_found_blocks(),
        Budget(total_bytes=2**34, context_bytes=0, headroom_bytes=0),
        Request(),
        precisions=["fp32"],
        optimizer="sgd",
        parallelisms=[DDP, FREED, KEPT],
    )
    found = SearchResult(session=ddp, estimate=ddp.judge(ddp.settings.recipe(2)))
    assert keeping_weights_can_gain(kept, found)
    assert keeping_weights_can_gain(freed, found)
