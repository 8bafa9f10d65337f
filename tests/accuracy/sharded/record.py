"""Train as one rank of several on the null driver, and record what was allocated.

    python -m tests.accuracy.nulldriver.run --gpu CARD -- \
        python -m tests.accuracy.sharded.record CARD [NAME...]

PyTorch's own wrappers run on its CUDA build, under its fake process group: with NCCL in
its place FSDP2 makes the same calls of the allocator. The steps are those of a ``Run``,
written out. Writes ``recordings.json``. Cases of DeepSpeed need it in that environment,
installed with ``DS_BUILD_OPS=0 pip install --no-deps``, so that torch stays, and what
it imports: hjson, msgpack, einops, psutil, py-cpuinfo, ninja.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import Mock

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from budgetfit.applying.checkpointing.apply_segments import apply_segments
from budgetfit.applying.loss.chunked_loss import chunk_loss
from budgetfit.applying.precision import apply_precision
from budgetfit.applying.undo import Undo
from budgetfit.core.precision import find_precision
from tests.accuracy.provenance import answer_for_the_device, choose_cudnn, origin
from tests.accuracy.sharded.cases import CASES, FILE, MODELS, STEPS, ShardedCase

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
Peaks = list[tuple[str, int, int]]


class Recorder:
    """The peaks of each phase: allocated and reserved bytes."""

    def __init__(self) -> None:
        self.rows: Peaks = []
        self._phase = "setup"
        self._reset = torch.cuda.reset_peak_memory_stats
        torch.cuda.reset_peak_memory_stats = Mock()  # DeepSpeed calls it
        self._reset()

    def begin(self, phase: str) -> None:
        """End the phase before, and begin another."""
        torch.cuda.synchronize()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        self.rows.append((self._phase, *peaks))
        self._phase = phase
        self._reset()


def wrap(case: ShardedCase, model: nn.Module) -> nn.Module:
    """Wrap the model, as a program of one's own does."""
    given = case.parallelism
    if given.engine == "deepspeed":
        return initialize(case, model)
    if given.engine == "ddp":
        # It reads what other ranks sent: the null driver has no values.
        ddp_module._verify_param_shape_across_processes = Mock()
        wrapped = DistributedDataParallel(
            model,
            device_ids=[0],
            bucket_cap_mb=given.bucket_cap_mb,
            gradient_as_bucket_view=given.gradient_as_bucket_view,
        )
        # torch reads the annotations of a hook: this one has none.
        wrapped.register_comm_hook(None, lambda _, bucket: reduce(bucket))
        return wrapped
    mesh = (
        init_device_mesh(
            "cuda",
            (given.gpus // given.shard, given.shard),
            mesh_dim_names=("replicate", "shard"),
        )
        if given.shard
        else init_device_mesh("cuda", (given.gpus,))
    )
    policy = MixedPrecisionPolicy(
        param_dtype=_DTYPES[given.param_dtype], reduce_dtype=_DTYPES[given.reduce_dtype]
    )
    settings = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if given.cpu_offload else OffloadPolicy(),
    }
    for name in case.blocks:
        fully_shard(
            model.get_submodule(name),
            reshard_after_forward=given.reshard_after_forward,
            **settings,
        )
    return fully_shard(model, **settings)


def initialize(case: ShardedCase, model: nn.Module) -> nn.Module:
    """Hand the model to DeepSpeed, with the optimizer that it is to shard."""
    given = case.parallelism
    buckets = ("reduce_bucket_size", "allgather_bucket_size")
    zero: dict[str, Any] = {"stage": given.zero_stage}
    if given.bucket_elements is not None:
        zero |= dict.fromkeys(buckets, given.bucket_elements)
    if given.overlap_comm is not None:
        zero["overlap_comm"] = given.overlap_comm
    os.environ["LOCAL_RANK"] = "0"  # as torchrun does
    deepspeed = importlib.import_module("deepspeed")
    engine: nn.Module = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(case, model),
        config={
            "train_micro_batch_size_per_gpu": case.samples,
            "bf16": {"enabled": given.param_dtype == "bf16"},
            "zero_optimization": zero,
        },
        dist_init_required=False,
    )[0]
    return engine


def reduce(bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce as DDP does: work of the fake process group has no result to read."""
    buffer = bucket.buffer()
    buffer.div_(distributed.get_world_size())
    distributed.all_reduce(buffer)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def make_optimizer(case: ShardedCase, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the name stands for."""
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    fused = case.optimizer == "adamw_torch_fused"
    return torch.optim.AdamW(model.parameters(), fused=fused or None)


def make_model(case: ShardedCase) -> nn.Module:
    """Build the model in host memory, or load it with adapters, as its users do."""
    if case.loading is None:
        return MODELS[case.model].build()
    # bitsandbytes and peft are needed for these alone.
    loading = importlib.import_module("tests.accuracy.loading.record")
    with tempfile.TemporaryDirectory() as folder:
        loading.save(case.loading, folder)
        model: nn.Module = loading.load(case.loading, folder)
    return model.train()


def record(case: ShardedCase) -> Peaks:
    """Return the peaks of the setup and of each phase of each step."""
    distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=case.parallelism.gpus
    )
    recorder = Recorder()
    model = make_model(case)
    if case.parallelism.engine == "ddp":
        model.cuda()
    # On the host where ``fully_shard`` moves the weights.
    undo = apply_precision(model, find_precision(case.precision), "cuda")
    del undo
    if case.compiled:
        compile_every_block(model, case.blocks)
    # The null driver has no values to compare.
    apply_segments(model, case.recipe.segments, determinism_check="default")
    chunks: Callable[[], AbstractContextManager[Any]] = nullcontext
    if case.loss_chunks > 1:
        chunked = chunk_loss(model, case.loss_chunks, Undo())
        chunks = chunked.training_forward
    wrapped = wrap(case, model)
    optimizer = (
        wrapped
        if case.parallelism.engine == "deepspeed"
        else make_optimizer(case, model)
    )
    if case.compiled:
        recorder.begin("compile")
        reduces = case.parallelism.engine != "ddp"  # which then makes other buckets
        train(case, wrapped, Mock(), Mock(), chunks, is_last=reduces)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    for _ in range(STEPS):
        for micro in range(case.accumulation):
            is_last = micro == case.accumulation - 1
            recorder.begin("forward")
            train(case, wrapped, optimizer, recorder, chunks, is_last=is_last)
    recorder.begin("")
    distributed.destroy_process_group()
    return [row for row in recorder.rows if row[0] != "compile"]


def compile_every_block(model: nn.Module, blocks: tuple[str, ...]) -> None:
    """``torch.compile`` for the forward of each block, in a graph of its own."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.config.recompile_limit = 64  # blocks share their code
    dynamo.config.optimize_ddp = False
    options = {"shape_padding": False}  # whether it pays, only a GPU can tell
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward, dynamic=False, options=options)


def train(
    case: ShardedCase,
    wrapped: nn.Module,
    optimizer: Any,
    recorder: Recorder,
    chunks: Callable[[], AbstractContextManager[Any]],
    *,
    is_last: bool,
) -> None:
    """One micro-batch; the batch lives to its end."""
    loaded = batch = case.batch("cuda")
    # DeepSpeed leaves inputs as they are.
    if case.precision == "bf16" or case.parallelism.engine == "deepspeed":
        batch = {
            name: x.to(torch.bfloat16) if x.is_floating_point() else x
            for name, x in loaded.items()
        }
    given = case.parallelism
    reduces = is_last or given.sync_each_batch
    context: Any = nullcontext()
    if given.engine == "fsdp2":
        wrapped.set_requires_gradient_sync(reduces)
    elif given.engine == "deepspeed":
        wrapped.set_gradient_accumulation_boundary(is_last)
    elif not reduces:
        context = wrapped.no_sync()
    casts = case.precision == "bf16-mixed" and given.param_dtype is None
    with context:
        autocast: Any = torch.autocast("cuda", torch.bfloat16)
        with autocast if casts else nullcontext(), chunks():
            value = wrapped(**batch).loss
        reported = value.detach().clone()
        value = value / case.accumulation
        recorder.begin("backward")
        if given.engine == "deepspeed":
            wrapped.backward(value, scale_wrt_gas=False)
        else:
            value.backward()
    del value
    if is_last:
        recorder.begin("optimizer")
        optimizer.step()
        if given.engine != "deepspeed":
            optimizer.zero_grad(set_to_none=True)
    del reported, loaded


def main() -> None:
    """Record the cases of a card, each in a process of its own."""
    card, *names = sys.argv[1:]
    if names[:1] == ["--one"]:
        choose_cudnn(enabled=False)
        answer_for_the_device()
        if origin() != "null driver":
            raise SystemExit("this is a recording of the null driver")
        sys.stdout.write(json.dumps(record(CASES[names[1]])))
        sys.stdout.flush()
        os._exit(0)  # a thread of DeepSpeed's streams may abort the end of the process
    rows = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    for name in names or CASES:
        if CASES[name].card != card or (not names and name in rows):
            continue
        command = [sys.executable, "-m", __spec__.name, card, "--one", name]
        environment = dict(os.environ)
        if CASES[name].parallelism.engine != "fsdp2":
            # They read numbers of their own by way of the device.
            environment["NULLCUDA_ECHO"] = "1"
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment
        )
        if done.returncode:
            print(name, done.stderr[-2000:], flush=True)
            continue
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, max(row[1] for row in rows[name]), flush=True)
        text = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
        FILE.write_text("{\n" + text + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
