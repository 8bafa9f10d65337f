"""States of several ranks: saved, killed, and resumed on another number of them."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from budgetfit import InputError, Parallelism, Recipe
from budgetfit.applying.run.run import Run
from tests.applying.ranks.killed_ranks import (
    KILLED_AFTER,
    MOMENTUM,
    RESUMED,
    UPDATES,
    killed_and_resumed,
    start,
    train,
)
from tests.applying.ranks.test_many_ranks import batches
from tests.gloo_ranks import on_ranks


def _bytes(state: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_killed_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    undisturbed, resumed = killed_and_resumed(tmp_path)
    assert len(resumed) == 4 * len(RESUMED)
    for losses in resumed.values():
        assert losses == pytest.approx(undisturbed, abs=1e-6)
    dcp_to_torch_save(str(tmp_path / "fsdp2"), tmp_path / "whole.pt")
    run = start("", 1)
    run.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["run"])
    assert train(run, KILLED_AFTER, UPDATES) == pytest.approx(undisturbed, abs=1e-6)


def _states(alone: dict[str, Any]) -> None:
    # One process's state, in all ranks' shards; and the state of no step yet.
    run = start("fsdp2", 2)
    run.load_state_dict(alone)
    assert run.steps_done == 1
    assert train(run, 1, 2) == pytest.approx(alone["next"], abs=1e-6)
    torch.manual_seed(run.ranks.rank)
    state = run.state_dict()
    expected = torch.rand(3)
    run.load_state_dict(state)
    assert torch.equal(torch.rand(3), expected)  # this rank's own generator
    new = start("fsdp2", 2)
    first = new.state_dict()
    assert not new.optimizer.state
    new.load_state_dict(first)
    assert not new.optimizer.state
    new.step(batches(2, 1)[run.ranks.rank])
    with pytest.raises(InputError, match=r"1 micro-batches wait for an update.*flush"):
        new.state_dict()
    with pytest.raises(InputError, match="gradients of micro-batches that wait"):
        new.load_state_dict({**alone, "gradients": []})
    (group,) = alone["optimizer"]["param_groups"]
    more = [{**group, "params": [*group["params"], len(group["params"])]}]
    with pytest.raises(InputError, match=r"it has \[53\] parameters .* has \[52\]"):
        new.load_state_dict(
            {**alone, "optimizer": {**alone["optimizer"], "param_groups": more}}
        )
    assert new.group.count == 1
    other = start("fsdp2", 2, optimizer="sgd")
    with pytest.raises(InputError, match=r"saved from AdamW, and this run .* SGD"):
        other.load_state_dict(state)


# Optimizers whose parameters have no state, a state from the first step on, and states
# of fewer dimensions than they themselves (under FSDP2 it cannot train).
OPTIMIZERS = ("sgd", MOMENTUM, "adafactor")
RATE = 3e-3  # as a scheduler sets it


def _rates(run: Run) -> set[float]:
    return {group["lr"] for group in run.optimizer.param_groups}


def _set_rate(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = RATE


def _save_and_load(folder: str) -> dict[str, list[list[float]]]:
    """Losses after another run of these ranks, and one process, were loaded."""
    found: dict[str, list[list[float]]] = {}
    for optimizer in OPTIMIZERS:
        for engine in ("ddp", "fsdp2")[: 1 if optimizer == "adafactor" else 2]:
            saved = start(engine, 2, optimizer=optimizer)
            path = f"{folder}/{optimizer} {engine}"
            saved.state_dict()  # leaves no state of no step
            train(saved, 0, 1)
            _set_rate(saved)
            dcp.save({"run": saved}, checkpoint_id=path)
            run = start(engine, 2, optimizer=optimizer)
            dcp.load({"run": run}, checkpoint_id=path)
            assert _rates(run) == {RATE}
            again = start(engine, 2, optimizer=optimizer)
            alone = torch.load(f"{folder}/alone.pt", weights_only=True)
            again.load_state_dict(alone[optimizer])
            assert _rates(again) == {RATE}
            assert run.steps_done == again.steps_done == 1
            found[path] = [train(each, 1, 3) for each in (saved, run, again)]
    return found


def test_states_of_optimizers_that_keep_none_or_little(tmp_path: Path) -> None:
    alone, expected = {}, {}
    for optimizer in OPTIMIZERS:
        run = start("", 1, optimizer=optimizer)
        train(run, 0, 1)
        _set_rate(run)
        alone[optimizer] = torch.load(_bytes(run.state_dict()), weights_only=True)
        expected[optimizer] = train(run, 1, 3)
    torch.save(alone, tmp_path / "alone.pt")  # as tensors it would be too many files
    for found in on_ranks(_save_and_load, 2, str(tmp_path)):
        for path, each in found.items():
            optimizer = Path(path).name.split()[0]
            for losses in each:
                assert losses == pytest.approx(expected[optimizer], rel=1e-5), path
            dcp_to_torch_save(path, tmp_path / "whole.pt")
            whole = torch.load(tmp_path / "whole.pt", weights_only=True)
            run = start("", 1, optimizer=optimizer)
            run.load_state_dict(whole["run"])
            assert _rates(run) == {RATE}
            assert train(run, 1, 3) == pytest.approx(expected[optimizer], rel=1e-5)


class Halves(nn.Module):
    """Only the first of two layers runs in the first update."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: 1 + self.both]:
            x = layer(x)
        return x.square().mean()


def start_halves(ranks: int) -> Run:
    several = None if ranks == 1 else Parallelism(engine="fsdp2", gpus=ranks)
    recipe = Recipe(batch_size=2, optimizer="adamw_torch", parallelism=several)
    return Run(Halves(), recipe, loss=lambda out, _: out, device="cpu")


def go_on(run: Run) -> list[float]:
    run.model.both = True
    return [float(run.step(torch.ones(2, 4))) for _ in range(3)]


def _half_trained(alone: bytes, path: str) -> list[list[float]]:
    saved = start_halves(2)
    saved.step(torch.ones(2, 4))
    dcp.save({"run": saved}, checkpoint_id=path)
    assert len(saved.optimizer.state) == 2
    loaded, from_one, back = start_halves(2), start_halves(2), start_halves(2)
    go_on(back)
    dcp.load({"run": loaded}, checkpoint_id=path)
    from_one.load_state_dict(torch.load(io.BytesIO(alone), weights_only=True))
    dcp.load({"run": back}, checkpoint_id=path)
    runs = (saved, loaded, from_one, back)
    assert [len(run.optimizer.state) for run in runs] == [2] * 4
    return [go_on(run) for run in runs]


def test_parameters_without_a_gradient_so_far_have_no_state(tmp_path: Path) -> None:
    run = start_halves(1)
    run.step(torch.ones(2, 4))
    state = _bytes(run.state_dict()).getvalue()
    expected = go_on(run)
    for each in on_ranks(_half_trained, 2, state, str(tmp_path / "sharded"))[0]:
        assert each == pytest.approx(expected, abs=1e-6)
    dcp_to_torch_save(str(tmp_path / "sharded"), tmp_path / "whole.pt")
    run = start_halves(1)
    run.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True)["run"])
    assert len(run.optimizer.state) == 2
    assert go_on(run) == pytest.approx(expected, abs=1e-6)


def test_states_of_one_process_of_no_step_and_of_others() -> None:
    run = start("", 1)
    train(run, 0, 1)
    names = [name for name, _ in run.model.named_parameters()]
    copied = torch.load(_bytes(run.state_dict()), weights_only=True)
    on_ranks(_states, 2, {**copied, "next": train(run, 1, 2)})

    # A state by names is one process's as well, but not one of fewer parameters.
    by_name = {
        "state": dict(zip(names, copied["optimizer"]["state"].values(), strict=True)),
        "param_groups": [{**copied["optimizer"]["param_groups"][0], "params": names}],
    }
    run.load_state_dict({**copied, "optimizer": by_name})
    assert run.steps_done == 1
    by_name["param_groups"][0]["params"] = names[1:]
    with pytest.raises(InputError, match=r"it has \[51\] parameters .* has \[52\]"):
        run.load_state_dict({**copied, "optimizer": by_name})
