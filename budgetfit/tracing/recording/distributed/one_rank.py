"""Trace as rank 0 of several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from budgetfit.core.parallelism import ZERO_3, Parallelism
from budgetfit.tracing.recording.distributed.data_parallel import data_parallel_on_fakes
from budgetfit.tracing.recording.distributed.deepspeed_zero import deepspeed_on_fakes
from budgetfit.tracing.recording.distributed.fully_sharded import fully_shard_on_fakes
from budgetfit.tracing.recording.distributed.offloaded_log import OffloadedLog
from budgetfit.tracing.recording.distributed.process_group import fake_process_group
from budgetfit.tracing.recording.distributed.rank_log import RankLog
from budgetfit.tracing.records import OpSemantics, RunOp

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


def as_one_rank(
    parallelism: Parallelism,
    semantics: OpSemantics | None,
    run: RunOp,
    mode: FakeTensorMode,
) -> tuple[RankLog, AbstractContextManager[None]]:
    """Return the storage log of rank 0, and the context to trace in.

    In it the traced program can wrap its model; opening it raises an InputError if the
    process is one of several already.
    """
    # A CPU's memory is one.
    offloads = parallelism.cpu_offload and semantics is not None
    log = (OffloadedLog if offloads else RankLog)(semantics, run, mode)
    # FSDP2 and DeepSpeed take the weights from the host as they wrap the model.
    log.paused = parallelism.engine != "ddp"
    log.is_zero_3 = parallelism.zero_stage == ZERO_3
    return log, _context(parallelism, log)


@contextlib.contextmanager
def _context(parallelism: Parallelism, log: RankLog) -> Iterator[None]:
    on_fakes = {
        "ddp": data_parallel_on_fakes,
        "fsdp2": fully_shard_on_fakes,
        "deepspeed": deepspeed_on_fakes,
    }
    with fake_process_group(parallelism.gpus), on_fakes[parallelism.engine](log):
        yield
