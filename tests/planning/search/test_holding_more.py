"""What holds more on each rank is left out only where it is no faster."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from budgetfit.core.budget import Budget
from budgetfit.core.parallelism import Parallelism
from budgetfit.gpus.nccl_memory import nccl_memory
from budgetfit.gpus.table import find_gpu
from budgetfit.planning.search.holding_more import MIN_GAIN, holding_more_can_gain
from budgetfit.planning.search.loss_chunking import search_with_loss_chunks
from budgetfit.planning.search.search import SearchResult
from budgetfit.planning.session import (
    PlanningSession,
    Request,
    holding_more,
    open_sessions,
)
from budgetfit.timing.kernel_times import PER_DOUBLED_NODES
from budgetfit.workload.workload import Workload
from tests.models import MIB, Mebi
from tests.planning.profiling.test_depth_extrapolation import MIB_BATCH

FREED = Parallelism(engine="fsdp2", gpus=8)
KEPT = replace(FREED, reshard_after_forward=False)
NCCL = nccl_memory(2, 1).high_bytes
SAMPLES = 4
DDP = Parallelism(engine="ddp", gpus=8)
OTHERWISE = (("reshard_after_forward", False), ("shard", 4))


def llama(width: int, layers: int, length: int, gpu: str) -> Workload:
    """A Llama with a small vocabulary, and a sample of ``length`` tokens."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=1000,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    found = Workload(model=model, batch=batch, gpu=find_gpu(gpu))
    return found.with_found_blocks()


def sessions(usable_bytes: int, *ways: Parallelism) -> list[PlanningSession]:
    """Sessions of sixteen blocks of 50 M weights, and samples of 4,096 tokens."""
    return open_sessions(
        llama(2048, 16, 4096, "h100-80gb"),
        Request(
            budget=Budget(
                total_bytes=usable_bytes + NCCL, context_bytes=0, headroom_bytes=0
            )
        ),
        precisions=["bf16-mixed"],
        optimizer="adamw_torch_fused",
        effective_batch_size=SAMPLES,
        parallelisms=ways,
    )


def waiting(found: SearchResult) -> SearchResult:
    """Return the result with a tenth of its step's time waiting for the network."""
    estimate = found.judged
    slow = replace(estimate, network_ms=estimate.step_ms / 10)
    return replace(found, estimate=slow)


def test_where_there_is_no_room_for_all_weights_they_are_not_kept() -> None:
    """Those of fourteen blocks are 1.3 GiB in bf16."""
    freed, kept = sessions(6000 * MIB, FREED, KEPT)
    found = search_with_loss_chunks(freed)
    found = waiting(found)
    assert not holding_more_can_gain(kept, found)
    recipe = found.judged.recipe
    same = kept.settings.recipe(recipe.batch_size, recipe.segments)
    assert not kept.judge(replace(same, loss_chunks=recipe.loss_chunks)).fits
    roomy = kept.asking(budget=replace(kept.budget, total_bytes=2**36))
    assert holding_more_can_gain(roomy, found)


def test_only_freed_weights_say_so() -> None:
    """Other engines, and sessions that do not keep weights, are searched."""
    workload = Workload(model=Mebi(6), batch=MIB_BATCH, gpu=find_gpu("t4"))
    ddp, freed, kept = open_sessions(
        workload.with_found_blocks(),
        Request(budget=Budget(total_bytes=2**34, context_bytes=0, headroom_bytes=0)),
        precisions=["fp32"],
        optimizer="sgd",
        parallelisms=[DDP, FREED, KEPT],
    )
    found = SearchResult(session=ddp, estimate=ddp.judge(ddp.settings.recipe(2)))
    assert holding_more_can_gain(kept, found)
    assert holding_more_can_gain(freed, found)


def test_copies_in_each_node_are_tried_where_the_network_takes_long() -> None:
    """A per cent of the step may be gained, if all that it waits for it is."""
    spread = replace(FREED, gpus_per_node=4)
    copied = replace(spread, shard=4)
    whole, each_node = sessions(2**35, spread, copied)
    assert each_node.settings.parallelism == copied
    assert each_node.budget.usable_bytes < whole.budget.usable_bytes  # communicators
    found = search_with_loss_chunks(whole)
    assert 0 < found.judged.network_ms < MIN_GAIN * found.judged.step_ms
    assert not holding_more_can_gain(each_node, found)
    assert holding_more_can_gain(each_node, waiting(found))
    # Nor where what was found is not the fastest: only what waits can be saved.
    slower = replace(whole.judge(whole.settings.recipe(1)), network_ms=0.0)
    assert not holding_more_can_gain(each_node, replace(found, estimate=slower))


def test_ranks_of_two_nodes_wait_for_the_slowest() -> None:
    """So the judge says, and the solver."""
    judged, solved = [], []
    for parallelism in (FREED, replace(FREED, gpus_per_node=4)):
        session, *_ = sessions(2**35, parallelism)
        estimate = session.judge(session.settings.recipe(1))
        judged.append(estimate.step_ms - estimate.network_ms)
        blocks = session.block_chain.profile_at(1).blocks
        solved.append(sum(block.backward_ns for block in blocks))
    for one, two in (judged, solved):
        assert two / one == pytest.approx(1 + PER_DOUBLED_NODES, rel=1e-4)


def test_gradients_are_reduced_once_per_update_only_where_that_may_gain() -> None:
    """Those of sixteen blocks are 1.5 GiB in bf16, and their shards 0.4 GiB."""
    each = replace(FREED, sync_each_batch=True)
    reduced, once = sessions(2**36, each, FREED)
    assert once.traces.log == []  # it is asked about without a trace
    found = search_with_loss_chunks(reduced.asking(batch_size=1))
    assert found.judged.recipe.gradient_accumulation_steps == SAMPLES
    assert not holding_more_can_gain(once, found)
    slow = waiting(found)
    assert holding_more_can_gain(once, slow)
    # Without an effective batch size a plan has one micro-batch.
    free = once.changed(effective_batch_size=None, accumulation=2)
    assert not holding_more_can_gain(free, slow)
    # Where nothing fits, what holds more does not either; nor whole gradients here.
    assert not holding_more_can_gain(once, replace(found, estimate=None))
    chain = reduced.block_chain.streams_apart.profile_at(1, exact_blocks=False)
    for more, may_gain in ((900 * MIB, False), (1500 * MIB, True)):
        room = Budget(
            total_bytes=chain.static_bytes + more + NCCL,
            context_bytes=0,
            headroom_bytes=0,
            nccl=once.budget.nccl,
        )
        assert holding_more_can_gain(once.asking(budget=room), slow) == may_gain


def test_what_holds_more_weights() -> None:
    spread = replace(FREED, gpus_per_node=4)
    kept, copied = (replace(spread, **{key: value}) for key, value in OTHERWISE)
    both = replace(copied, reshard_after_forward=False)
    assert set(holding_more(spread)) == {kept, copied, both}
    assert set(holding_more(copied)) == {both}
    assert set(holding_more(kept)) == {both}
    assert not holding_more(both)
    assert holding_more(FREED) == (KEPT,)
    each, kept_each = (replace(way, sync_each_batch=True) for way in (FREED, KEPT))
    assert set(holding_more(each)) == {FREED, KEPT, kept_each}
    zero = Parallelism(engine="deepspeed", gpus=8, zero_stage=2)
    assert holding_more(zero) == (replace(zero, overlap_comm=True),)
    assert not holding_more(replace(zero, zero_stage=3))  # it overlaps by default
    assert not holding_more(DDP)
    assert not holding_more(None)
