"""Data parallelism: DistributedDataParallel with gloo, in one process and in two."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import distributed

from budgetfit.core.plan import Plan
from tests.training_loops.own_loops import PlainDDP, PreparedDDP, RunDDP, Trained, train
from tests.training_loops.settings import Settings


def run_under_ddp(settings: Settings, plan: Plan | None, folder: Path) -> Trained:
    """``run.model = DistributedDataParallel(run.model)``."""
    return _as_rank(0, 1, settings, plan, folder, RunDDP)


def prepared_under_ddp(settings: Settings, plan: Plan | None, folder: Path) -> Trained:
    """``plan.prepare(model)``, then DistributedDataParallel around it."""
    return _as_rank(0, 1, settings, plan, folder, PreparedDDP)


def run_in_two_processes(
    settings: Settings, plan: Plan | None, folder: Path
) -> Trained:
    """Two processes, each with its own batches; losses and weights are both's."""
    given = settings, plan, folder, RunDDP
    other = _second_process().submit(_as_rank, 1, 2, *given)
    first = _as_rank(0, 2, *given)
    second = other.result()
    return Trained(
        first.losses + second.losses,
        {
            f"rank {rank}: {name}": item
            for rank, each in enumerate((first, second))
            for name, item in each.final.items()
        },
        (first.block_runs + second.block_runs) // 2,  # as often as in each
    )


@functools.cache
def _second_process() -> ProcessPoolExecutor:
    """Return a process that stays: importing the libraries takes seconds."""
    return ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    )


def _as_rank(
    rank: int,
    processes: int,
    settings: Settings,
    plan: Plan | None,
    folder: Path,
    planned: object,
) -> Trained:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/processes",
        rank=rank,
        world_size=processes,
    )
    try:
        return train(settings, plan, PlainDDP, planned, rank=rank)
    finally:
        distributed.destroy_process_group()
