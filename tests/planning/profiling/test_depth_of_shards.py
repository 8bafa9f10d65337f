"""Traces of ranks made from a shortened model are the whole model's, to the byte."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from budgetfit import Parallelism, Recipe, Segment
from budgetfit.core.budget import Budget
from budgetfit.gpus.nccl_memory import nccl_memory
from budgetfit.gpus.table import find_gpu
from budgetfit.inputs.several_gpus import parallelisms
from budgetfit.planning.profiling.block_chain import checkpoint_every_block
from budgetfit.planning.session import Request, budget_of_rank, open_sessions
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.models import Mebi
from tests.planning.profiling.test_depth_extrapolation import (
    ADA,
    MIB_BATCH,
    MODELS,
    Last,
    assert_same,
    eight,
    every_other,
    keep,
    pairs,
)

POLICY = Parallelism(engine="fsdp2", gpus=8, param_dtype="bf16", reduce_dtype="fp32")
AUTOCAST = Parallelism(engine="fsdp2", gpus=8)
DDP = Parallelism(engine="ddp", gpus=4)
NCCL = nccl_memory(2, 1).high_bytes
every = checkpoint_every_block


def selective(blocks: tuple[str, ...]) -> tuple[Segment, ...]:
    saved = ("aten.mm.default:0", "aten.mm.default:2")
    return tuple(Segment((each,), "selective", saved_ops=saved) for each in blocks)


def offloaded(blocks: tuple[str, ...]) -> tuple[Segment, ...]:
    return tuple(Segment((each,), "offload") for each in blocks)


def on_host(blocks: tuple[str, ...]) -> tuple[Segment, ...]:
    return tuple(Segment((each,), input_on_host=True) for each in blocks)


def sharded(**changes: Any) -> Parallelism:
    return replace(POLICY, **changes)


# Model, what blocks do, micro-batches, optimizer, precision, engine.
CASES: dict[str, tuple[str, Any, int, str, str, Parallelism]] = {
    "freed": ("llama", keep, 1, "adamw_torch_fused", "bf16-mixed", POLICY),
    "recomputed": ("mebi", every, 1, "adamw_torch_fused", "bf16-mixed", POLICY),
    "kept after forward": (
        *("mebi", keep, 3, "adamw_torch_fused", "bf16-mixed"),
        sharded(reshard_after_forward=False),
    ),
    "over two ranks": (
        *("mebi", every, 1, "adamw_torch", "bf16-mixed"),
        sharded(reshard_after_forward=2),
    ),
    "HSDP": ("mebi", keep, 2, "adamw_torch_fused", "bf16-mixed", sharded(shard=4)),
    "unequal shards": ("mebi", keep, 1, "sgd", "bf16-mixed", sharded(gpus=7)),
    "reduced in bf16": (
        *("mebi", keep, 1, "adamw_torch_fused", "bf16-mixed"),
        sharded(reduce_dtype="bf16"),
    ),
    "each micro-batch reduced": (
        *("mebi", every, 3, "adamw_torch_fused", "bf16-mixed"),
        sharded(sync_each_batch=True),
    ),
    "in host memory": (
        *("mebi", keep, 1, "adamw_torch_fused", "bf16-mixed"),
        sharded(cpu_offload=True),
    ),
    "in host memory, each micro-batch reduced": (
        *("llama", every, 3, "adamw_torch", "bf16-mixed"),
        sharded(cpu_offload=True, sync_each_batch=True),
    ),
    "autocast": ("mebi", keep, 2, "adamw_torch_fused", "bf16-mixed", AUTOCAST),
    "fp32": ("mebi", every, 3, "adamw_torch", "fp32", AUTOCAST),
    "bf16 weights": ("mebi", keep, 1, "sgd", "bf16", AUTOCAST),
    "half recomputed": ("mebi", eight, 2, "sgd", "bf16-mixed", POLICY),
    "every other": ("mebi", every_other, 1, "sgd", "bf16-mixed", POLICY),
    "segments": ("mebi", pairs, 2, "sgd", "bf16-mixed", POLICY),
    "chunked loss": ("llama", every, 2, "sgd", "bf16-mixed", POLICY),
    "selective": (*("llama", selective, 1, "sgd", "bf16-mixed"), POLICY),
    "offloaded": ("llama", offloaded, 2, "sgd", "bf16-mixed", POLICY),
    "inputs on host": ("llama", on_host, 1, "sgd", "bf16-mixed", AUTOCAST),
    "DDP": ("llama", keep, 3, "adamw_torch_fused", "bf16-mixed", DDP),
    "DDP, many buckets": (
        *("mebi", every, 1, "adamw_torch_fused", "bf16-mixed"),
        replace(DDP, bucket_cap_mb=3),
    ),
    "DDP, gradients as views": (
        *("mebi", eight, 2, "sgd", "bf16-mixed"),
        replace(DDP, gradient_as_bucket_view=True),
    ),
    "DDP, each micro-batch reduced": (
        *("mebi", every_other, 3, "adamw_torch", "fp32"),
        replace(DDP, bucket_cap_mb=3, sync_each_batch=True),
    ),
    "a pattern": ("mebi thirds", every, 2, "sgd", "bf16-mixed", POLICY),
    "a pattern offloaded": ("mebi thirds", offloaded, 1, "sgd", "bf16-mixed", AUTOCAST),
    "DDP, a pattern": ("mebi thirds", keep, 2, "adamw_torch_fused", "bf16-mixed", DDP),
    "DDP, compiled": ("short gpt2", keep, 2, "sgd", "bf16-mixed", DDP),
    "a pattern compiled": ("mebi thirds", every, 1, "sgd", "bf16-mixed", POLICY),
    "DDP, segments": ("mebi", pairs, 1, "adamw_torch_fused", "fp16-mixed", DDP),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trace_from_a_shortened_model_is_the_whole_one(name: str) -> None:
    kind, segments, micro_batches, optimizer, precision, parallelism = CASES[name]
    make, batch = MODELS[kind]
    workload = Workload(model=make().train(), batch=batch, gpu=ADA).with_found_blocks()
    recipe = Recipe(
        batch_size=2,
        precision=precision,
        optimizer=optimizer,
        gradient_accumulation_steps=micro_batches,
        segments=segments(workload.blocks),
        loss_chunks=3 if name == "chunked loss" else 1,
        compile="blocks" if "compiled" in name else "none",
        parallelism=parallelism,
    )
    traces = TraceSession(workload)
    made = traces.exact(recipe)
    assert "in a shortened model with" in traces.log[-1]
    assert made.stream.any() == (parallelism.engine == "fsdp2")
    assert_same(made, TraceSession(workload, full_depth=True).exact(recipe))


class Normed(nn.Module):
    """A block with batch norm, whose buffers DDP sends before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.conv(x))
        return x + y.relu()


def test_buffers_that_ddp_sends_are_those_of_all_blocks() -> None:
    batch = torch.zeros(2, 16, 16, 16)
    workload = Workload(
        model=nn.Sequential(*(Normed() for _ in range(12))), batch=batch, gpu=ADA
    ).with_found_blocks()
    recipe = Recipe(
        batch_size=2,
        precision="fp32",
        optimizer="sgd",
        gradient_accumulation_steps=2,
        parallelism=DDP,
    )
    traces = TraceSession(workload)
    made = traces.exact(recipe)
    assert "in a shortened model with" in traces.log[-1]
    assert_same(made, TraceSession(workload, full_depth=True).exact(recipe))
    # Mean and variance of 16 channels, and a counter of batches.
    sent = np.array(made.op_names)[made.ops.name] == "c10d.broadcast_.default"
    last = made.ops.bytes_fixed[sent][-2:].sum()
    assert last == 12 * (2 * 16 * 4 + 8)


def test_a_trace_for_all_batch_sizes_is_the_same_too() -> None:
    workload = Workload(model=Mebi(12), batch=MIB_BATCH, gpu=ADA).with_found_blocks()
    recipe = Recipe(batch_size=8, precision="bf16-mixed", parallelism=POLICY)
    traces = TraceSession(workload)
    made = traces.affine(recipe)
    assert "in a shortened model with 5" in traces.log[-1]
    assert_same(made, TraceSession(workload, full_depth=True).affine(recipe))
    # One proof is enough for any number of micro-batches above one.
    for count in (1, 2, 3):
        traces.exact(replace(recipe, batch_size=1, gradient_accumulation_steps=count))
    assert [line.rpartition(" ")[2] for line in traces.log[-4:]] == [*"4454"]


def test_what_depends_on_the_number_of_blocks_is_traced_whole() -> None:
    workload = Workload(model=Last(12), batch=MIB_BATCH, gpu=ADA).with_found_blocks()
    recipe = Recipe(batch_size=2, precision="bf16-mixed", parallelism=POLICY)
    traces = TraceSession(workload)
    made = traces.exact(recipe)
    assert "shortened" not in traces.log[-1]
    assert_same(made, TraceSession(workload, full_depth=True).exact(recipe))


def test_the_ranks_of_a_machine_share_its_host_memory() -> None:
    budget = Budget(
        total_bytes=2**34, context_bytes=0, headroom_bytes=0, host_ram_bytes=2**30
    )
    for machines, share in ((1, 2**27), (4, 2**29)):
        several = sharded(gpus=8, gpus_per_node=8 // machines)
        assert budget_of_rank(budget, several).host_ram_bytes == share
    unlimited = replace(budget, host_ram_bytes=None)
    assert budget_of_rank(unlimited, POLICY).host_ram_bytes is None


def test_ddp_is_traced_only_where_one_gpu_holds_the_optimizer_step() -> None:
    model: nn.Module = Mebi(6)
    weights = sum(each.nbytes for each in model.parameters())
    workload = Workload(
        model=model, batch=MIB_BATCH, gpu=find_gpu("t4")
    ).with_found_blocks()

    def engines(copies: float, engine: str = "auto") -> list[str]:
        total = NCCL + round(copies * weights)
        found = open_sessions(
            workload,
            Request(
                budget=Budget(total_bytes=total, context_bytes=0, headroom_bytes=0)
            ),
            precisions=["fp32"],
            optimizer="adamw_torch_fused",
            parallelisms=parallelisms(2, engine),
        )
        return [getattr(each.settings.parallelism, "engine", "") for each in found]

    # Weights, gradients and two states of AdamW.
    assert engines(8) == ["ddp", *["fsdp2"] * 8]
    assert engines(3.9) == ["fsdp2"] * 8
    assert engines(3.9, "ddp") == ["ddp"]


@pytest.mark.parametrize(
    ("optimizer", "offloaded"), [("sgd", {"fp32"}), ("adamw_torch_8bit", set())]
)
def test_what_cannot_train_on_the_cpu_stays_on_the_gpu(
    optimizer: str, offloaded: set[str]
) -> None:
    """Gradients of a scaled loss, and optimizers that have no kernels there."""
    # As where weights that are kept after the forward do not fit on the GPU.
    least, *others = parallelisms(2, "fsdp2")
    offloading = [each for each in others if each.cpu_offload]
    workload = Workload(
        model=Mebi(2), batch=MIB_BATCH, gpu=find_gpu("t4")
    ).with_found_blocks()
    found = open_sessions(
        workload,
        Request(budget=Budget(total_bytes=2**40, context_bytes=0, headroom_bytes=0)),
        precisions=["fp16-mixed", "fp32"],
        optimizer=optimizer,
        parallelisms=[least, *offloading],
    )
    assert len(found) == 2 + 4 * len(offloaded)
    for offloads, precisions in ((False, {"fp16-mixed", "fp32"}), (True, offloaded)):
        sessions = [each for each in found if each.offloads == offloads]
        assert {each.settings.precision for each in sessions} == precisions
