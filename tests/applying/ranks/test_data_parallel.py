"""Wrappers for several processes: refused around a model, missed around run.model."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import budgetfit
from budgetfit import InputError
from budgetfit.applying.data_parallel import warn_if_not_synchronized
from tests.applying.ranks.training_runs import batches, recipe, start
from tests.models import Mebi

BATCH = torch.zeros(2, 512, 512)


@pytest.fixture
def two_processes() -> Iterator[None]:
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=2
    )
    yield
    torch.distributed.destroy_process_group()


def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


@pytest.mark.usefixtures("two_processes")
def test_a_wrapper_goes_around_what_the_run_calls() -> None:
    plan = budgetfit.plan(Mebi(), vram="2GB", batch=BATCH, loss=loss)
    model = Mebi()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(InputError, match=r"Plan takes the plain one \(its \.module\)"):
        budgetfit.plan(wrapped, vram="2GB", batch=BATCH, loss=loss)
    with pytest.raises(InputError, match=r"Apply takes the plain one .*run\.model = "):
        budgetfit.apply(plan, wrapped, loss=loss)
    with pytest.raises(InputError, match="DataParallel is around the model"):
        budgetfit.apply(plan, DataParallel(model), loss=loss)
    with budgetfit.apply(plan, model, loss=loss) as run:  # refused, it was not claimed
        assert run.model is model


class FullyShardedDataParallel(torch.nn.Module):
    """Torch's needs a card; it is known by its name."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_parameters_that_fsdp_replaces_are_in_no_plan_for_one_gpu() -> None:
    message = r'plan\(\.\.\., gpus=N, engine="fsdp2"\)'
    plan = budgetfit.plan(Mebi(), vram="2GB", batch=BATCH, loss=loss)
    for wrapped in (
        FullyShardedDataParallel(Mebi()),
        torch.nn.Sequential(FullyShardedDataParallel(Mebi())),
    ):
        with pytest.raises(InputError, match=message):
            budgetfit.plan(wrapped, vram="2GB", batch=BATCH, loss=loss)
        with pytest.raises(InputError, match=message):
            budgetfit.apply(plan, wrapped, loss=loss)
    run = start(recipe())
    run.model = FullyShardedDataParallel(run.model)
    with pytest.raises(InputError, match=message):
        run.step(batches(1)[0])


@pytest.mark.usefixtures("two_processes")
def test_a_sharded_model_is_planned_before() -> None:
    model = Mebi()
    fully_shard(model)
    with pytest.raises(InputError, match="Leave fully_shard out while planning"):
        budgetfit.plan(model, vram="2GB", batch=BATCH, loss=loss)


@pytest.mark.usefixtures("two_processes")
def test_the_first_step_of_several_processes_misses_a_wrapper() -> None:
    run = start(recipe())
    batch, second = batches(2)
    with pytest.warns(UserWarning, match="2 processes train, and each of them a model"):
        run.step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(second)  # said once
        warn_if_not_synchronized(DistributedDataParallel(run.model))
    fully_shard(run.model)
    with pytest.warns(UserWarning, match="fully_shard has sharded the model") as said:
        warn_if_not_synchronized(run.model)
    assert len(said) == 1


def test_processes_of_torchrun_without_a_process_group_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "3")
    with pytest.warns(UserWarning, match=r"3 processes train, .*plan\(..., gpus=3\)"):
        start(recipe()).step(batches(1)[0])


def test_one_process_needs_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(recipe()).step(batches(1)[0])
