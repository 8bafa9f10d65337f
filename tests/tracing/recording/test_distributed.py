"""The trace of one rank of several: what it holds, and what it leaves behind."""

import logging
import os
import sys
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch import distributed, nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from budgetfit.core.parallelism import Parallelism
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import (
    CATEGORIES,
    HOST_STATE,
    OP_KINDS,
    SHARD_TO_DEVICE,
    SHARD_TO_HOST,
    StepTrace,
)
from budgetfit.errors import InputError
from budgetfit.gpus.table import find_gpu
from budgetfit.memory.host_copies import host_state_bytes, setup_host_bytes
from budgetfit.traces import trace_program
from budgetfit.traces.session import TraceSession
from budgetfit.workload.workload import Workload
from tests.models import MIB
from tests.traced import ADA, session

FSDP2 = Parallelism(engine="fsdp2", gpus=8)
DDP = Parallelism(engine="ddp", gpus=8)
BLOCKS = 3
BF16: dict[str, Any] = {"precision": "bf16-mixed"}


def zero(stage: Literal[1, 2, 3]) -> Parallelism:
    """DeepSpeed's, with buckets that do not outweigh the model."""
    return Parallelism(
        engine="deepspeed",
        gpus=8,
        zero_stage=stage,
        param_dtype="bf16",
        bucket_elements=1000,
    )


def trace(parallelism: Parallelism, **settings: Any) -> StepTrace:
    recipe = Recipe(batch_size=2, parallelism=parallelism, **settings)
    return session("mebi").exact(recipe)


def sharded(model: nn.Module, *blocks: str) -> StepTrace:
    batch = torch.zeros(2, 512)
    workload = Workload(model=model, batch=batch, gpu=find_gpu(ADA), blocks=blocks)
    return TraceSession(workload).exact(Recipe(batch_size=2, parallelism=FSDP2))


def live(trace: StepTrace, phase: str, step: int = -1) -> dict[str, int]:
    """Bytes alive at the end of a phase of the last step, by category."""
    step = trace.phases[-1].step if step < 0 else step
    end = next(p.end for p in trace.phases if (p.name, p.step) == (phase, step))
    events = trace.events[:end]
    alive = set(events[events > 0].tolist()) - set((-events[events < 0]).tolist())
    found = dict.fromkeys(CATEGORIES, 0)
    for event in alive:
        size = trace.fixed_bytes[event - 1] + trace.bytes_per_sample[event - 1] * 2
        found[CATEGORIES[trace.category[event - 1]]] += int(size)
    return found


def test_a_rank_of_fsdp2_keeps_its_shard_alone() -> None:
    """Three weights of 1 MiB, over 8 ranks: 1/8 MiB each, and AdamW's two states."""
    after = live(trace(FSDP2), "optimizer")
    assert after["parameters"] == BLOCKS * MIB // 8
    assert after["gradients"] == 0
    states = after["optimizer_state"] - 4 * BLOCKS  # and a step count each
    assert states == 2 * BLOCKS * MIB // 8


class Weights(nn.Module):
    """Weights in a list, which is no module that runs."""

    def __init__(self) -> None:
        super().__init__()
        weights = (nn.Parameter(torch.zeros(512, 512)) for _ in range(BLOCKS))
        self.weights = nn.ParameterList(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x.mean()


def test_a_block_of_parameters_alone_is_gathered_with_the_rest() -> None:
    found = sharded(Weights(), "weights")
    assert live(found, "optimizer")["parameters"] == BLOCKS * MIB // 8


class Cached(nn.Module):
    """Keeps what it has seen, as transformers' caches: it begins with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = torch.tensor([], dtype=x.dtype, device=x.device)
        seen = torch.cat([nothing, self.inner(x).flatten()])
        return seen.mean()


def test_an_empty_tensor_is_no_weight_that_was_freed() -> None:
    found = sharded(Cached(), "inner")
    assert live(found, "optimizer")["parameters"] == MIB // 8


def test_offloaded_shards_are_in_host_memory_with_gradients_and_states() -> None:
    found = trace(replace(FSDP2, cpu_offload=True))
    for phase in ("forward", "backward", "optimizer"):
        held = live(found, phase)
        kinds = ("parameters", "gradients", "optimizer_state")
        assert [held[kind] for kind in kinds] == [0, 0, 0], phase
    shard = MIB // 8
    counted = Counter(
        (found.op_names[name], bool(inside), int(size))
        for name, inside, size in zip(
            found.ops.name, found.ops.in_optimizer, found.ops.bytes_fixed, strict=True
        )
        if found.op_names[name].startswith("budgetfit.")
    )
    # Once as it is sharded, and the gradients of two steps; gathered in forward and
    # backward, but the last block's once, which is kept between them.
    assert counted[SHARD_TO_HOST, False, shard] == BLOCKS + 2 * BLOCKS
    gathered = counted[SHARD_TO_DEVICE, False, shard]
    assert 2 * BLOCKS < gathered <= 2 * 2 * BLOCKS
    assert counted[HOST_STATE, True, shard] % (2 * BLOCKS) == 0
    # A power of two each, so exactly: weights, gradients, and AdamW's two states with a
    # step count of 4 bytes.
    states = 2 * BLOCKS * shard + 4 * BLOCKS
    assert host_state_bytes(found) == states
    assert setup_host_bytes(found, 2) == 2 * BLOCKS * shard + states
    # The CPU updates them: nothing is done on the GPU meanwhile.
    cpu = found.ops.kind == OP_KINDS.index("cpu")
    is_state = found.ops.name == found.op_names.index(HOST_STATE)
    assert (cpu | is_state)[found.ops.in_optimizer].all()
    # AdamW reads weights, gradients and states, and writes all but the gradients.
    last = found.phases[-1]
    moved = found.ops.bytes_fixed[cpu & (found.ops.event >= last.start)].sum()
    assert moved == pytest.approx(7 * BLOCKS * shard, rel=0.01)


def test_what_several_micro_batches_pin_is_counted_once() -> None:
    once, twice = (
        trace(replace(FSDP2, cpu_offload=True, sync_each_batch=True), **steps)
        for steps in ({}, {"gradient_accumulation_steps": 2})
    )
    assert setup_host_bytes(once, 2) == setup_host_bytes(twice, 2)


class Stages(nn.Module):
    """Three blocks that are lists, or lists of lists, without a forward."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        self.nested = nested
        layers = (nn.Linear(512, 512, bias=False) for _ in range(BLOCKS))
        self.stages = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([layer]) if nested else layer])
            for layer in layers
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer[0](x) if self.nested else layer(x)
        return x.mean()


@pytest.mark.parametrize("nested", [False, True])
def test_a_block_that_is_a_list_is_sharded_as_a_group(*, nested: bool) -> None:
    names = tuple(f"stages.{number}" for number in range(BLOCKS))
    found = sharded(Stages(nested=nested), *names)
    assert live(found, "optimizer")["parameters"] == BLOCKS * MIB // 8
    assert live(found, "forward")["parameters"] < BLOCKS * MIB  # each for itself


@pytest.mark.parametrize(
    ("parallelism", "settings"),
    [
        (FSDP2, {}),
        (replace(FSDP2, reshard_after_forward=False, param_dtype="bf16"), BF16),
        (replace(FSDP2, sync_each_batch=True), {"gradient_accumulation_steps": 2}),
        (
            replace(FSDP2, shard=4, param_dtype="bf16"),
            {"gradient_accumulation_steps": 3},
        ),
        (FSDP2, {"precision": "bf16", "optimizer": "sgd"}),
        (FSDP2, {"segments": (Segment(("blocks.0",)), Segment(("blocks.1",)))}),
    ],
)
def test_the_second_step_of_fsdp2_is_the_first_again(
    parallelism: Parallelism, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(batch_size=2, parallelism=parallelism, **settings)
    derived = TraceSession(session("mebi").workload).exact(recipe)
    monkeypatch.setitem(trace_program.TRACED_STEPS, "fsdp2", 2)
    traced = TraceSession(session("mebi").workload).exact(recipe)

    def rows(trace: StepTrace) -> list[tuple[Any, ...]]:
        """Events with all that is known of their storages."""
        streams = trace.side_streams()
        return [
            (
                event > 0,
                trace.fixed_bytes[storage],
                CATEGORIES[trace.category[storage]],
                trace.layer[storage],
                streams.get(storage + 1, 0),
            )
            for event in trace.events.tolist()
            for storage in [abs(event) - 1]
        ]

    assert rows(derived) == rows(traced)
    assert derived.events.tolist() == traced.events.tolist()
    assert derived.phases == traced.phases
    assert derived.passes == traced.passes
    assert derived.ops.name.tolist() == traced.ops.name.tolist()


def test_uneven_shards_are_those_of_the_largest_rank() -> None:
    """512 rows over 7 ranks: 74 rows of 512 floats."""
    after = live(trace(replace(FSDP2, gpus=7)), "optimizer")
    assert after["parameters"] == BLOCKS * 74 * 512 * 4


def test_kept_weights_live_from_forward_to_backward() -> None:
    """Of the 3 MiB the last block's live to its backward in both cases."""
    freed, kept = (
        sum(live(trace(replace(FSDP2, reshard_after_forward=each)), "forward").values())
        for each in (True, False)
    )
    assert kept - freed >= (BLOCKS - 1) * MIB


def test_half_of_the_weights_are_gathered_in_half_precision() -> None:
    whole, half = (
        trace(replace(FSDP2, param_dtype=dtype, reshard_after_forward=False))
        for dtype in (None, "bf16")
    )
    assert sum(live(half, "forward").values()) < sum(live(whole, "forward").values())
    assert live(half, "optimizer")["parameters"] == BLOCKS * MIB // 8  # still fp32


def test_fsdp2_uses_side_streams_and_ddp_does_not() -> None:
    assert len(set(trace(FSDP2).side_streams().values())) == 2
    assert not trace(DDP).side_streams()


def test_gradients_that_are_not_reduced_stay_whole() -> None:
    """Of two micro-batches the first leaves 3 MiB, and reduced ones 3/8."""
    waiting, reduced = (
        trace(replace(FSDP2, sync_each_batch=each), gradient_accumulation_steps=2)
        for each in (False, True)
    )
    both = [live(each, "backward") for each in (waiting, reduced)]
    least = BLOCKS * MIB - BLOCKS * MIB // 8
    assert sum(both[0].values()) - sum(both[1].values()) >= least


@pytest.mark.parametrize("views", [True, False])
def test_ddp_has_one_bucket_and_then_those_of_their_size(views: bool) -> None:
    """One of 3 MiB at first; then the first of 1 MiB and one of the rest."""
    made = trace(replace(DDP, gradient_as_bucket_view=views))
    total = BLOCKS * MIB
    sizes = made.fixed_bytes.tolist()
    first_step = [p for p in made.phases if p.step < 1][-1].end
    before, after = (
        np.array(part) for part in (made.events[:first_step], made.events[first_step:])
    )
    freed = {-each for each in after.tolist() if each < 0}
    old = [n for n in before.tolist() if n > 0 and n in freed]
    assert total in [sizes[n - 1] for n in old]
    alive_at_end = set(made.events[made.events > 0].tolist()) - {
        -n for n in made.events.tolist() if n < 0
    }
    buckets = [sizes[n - 1] for n in alive_at_end & set(after.tolist())]
    assert sorted(buckets) == [MIB, 2 * MIB]


class Layers(nn.Module):
    """Weights and biases of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (300, 500, 700, 400)
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def test_ddp_reduces_the_buckets_that_its_own_reducer_makes() -> None:
    """Each where its last gradient is there, and not all at the end."""
    batch = torch.zeros(2, 300)
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = distributed.group.WORLD  # gloo's threads end after the reducer
    try:
        real: Any = DistributedDataParallel(Layers(), bucket_cap_mb=1)
        real._set_ddp_runtime_logging_sample_rate(1)
        for _ in range(3):
            real(batch).backward()
        logged = real._get_ddp_logging_data()
        del real
    finally:
        distributed.destroy_process_group()
    del group
    expected = [int(n) for n in str(logged["rebuilt_bucket_sizes"]).split(", ")]
    assert len(expected) == 3

    workload = Workload(model=Layers(), batch=batch, gpu=find_gpu(ADA), blocks=())
    made = TraceSession(workload).exact(
        Recipe(batch_size=2, parallelism=replace(DDP, bucket_cap_mb=1))
    )
    begin, end = next(
        (p.start, p.end) for p in made.phases if (p.step, p.name) == (2, "backward")
    )
    ops = made.ops
    inside = (ops.event > begin) & (ops.event <= end)
    names = np.array(made.op_names)[ops.name]
    reduces = inside & (names == "c10d.allreduce_.default") & (ops.bytes_fixed > 4)
    assert ops.bytes_fixed[reduces].tolist() == expected
    assert np.ptp(ops.event[reduces]) > 0
    assert not [name for name in names if name.startswith("ddp.")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shards_states_and_in_stage_3_weights(stage: Literal[1, 2, 3]) -> None:
    """Three weights of 1 MiB in fp32: over 8 ranks a master weight and two states."""
    after = live(trace(zero(stage), **BF16), "optimizer")
    assert after["optimizer_state"] - 4 == 3 * BLOCKS * MIB // 8  # and a step count
    assert after["gradients"] == 0
    weights = BLOCKS * MIB // 2
    assert after["parameters"] == (weights // 8 if stage == 3 else weights)


def test_zero_2_keeps_an_eighth_of_the_gradients_between_micro_batches() -> None:
    """Stage 1 reduces after the last one; of stage 2 a weight's gradient waits."""
    whole, eighth = (
        sum(
            live(
                trace(zero(stage), gradient_accumulation_steps=2, **BF16), "backward"
            ).values()
        )
        for stage in (1, 2)
    )
    gradients = BLOCKS * MIB // 2
    assert whole - eighth >= gradients - gradients // 8 - MIB // 2


def test_zero_3_gathers_on_a_stream_of_its_own() -> None:
    overlapped = trace(zero(3), **BF16)
    assert overlapped.side_streams()
    assert "DeepSpeed's streams" in overlapped.notes[-1]
    one_stream = trace(replace(zero(3), overlap_comm=False), **BF16)
    assert not one_stream.side_streams()
    assert "DeepSpeed" not in " ".join(one_stream.notes)


def test_an_infinite_gradient_is_not_assumed() -> None:
    """Fakes have no values, and a step that is skipped makes no states."""
    made = trace(zero(2), **BF16)
    states = live(made, "optimizer", step=0)["optimizer_state"]
    assert states > BLOCKS * MIB // 8  # more than the weights in fp32


def test_a_trace_leaves_nothing_behind() -> None:
    def seen() -> list[object]:
        return [
            distributed.is_initialized(),
            sys.excepthook,
            torch.UntypedStorage.resize_,
            DeviceMesh.__init__,
            DistributedDataParallel.__init__,
            functional.linear,
            torch.Tensor.record_stream,
            os.environ.get("LOCAL_RANK"),
            get_accelerator(),
            dict(vars(groups)),
            logging.root.manager.disable,
        ]

    before = seen()
    trace(replace(zero(3), gpus=4), **BF16)
    trace(replace(FSDP2, gpus=4))
    trace(replace(DDP, gpus=4))
    assert seen() == before


def test_a_process_group_of_ones_own_is_left_alone() -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(InputError, match="process group already"):
            trace(replace(FSDP2, gpus=16))
        assert distributed.get_world_size() == 2
    finally:
        distributed.destroy_process_group()


def test_one_gpu_has_no_streams_and_no_group() -> None:
    made = session("mebi").exact(Recipe(batch_size=2))
    assert not made.side_streams()
    assert "c10d" not in "".join(made.op_names)
