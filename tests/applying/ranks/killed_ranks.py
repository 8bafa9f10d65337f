"""``python -m tests.applying.ranks.killed_ranks``: one of two dies, four go on.

A training of two ranks with gloo is saved by ``torch.distributed.checkpoint``; then one
rank is killed with SIGKILL. Four ranks load the state, of either engine, and their
losses are compared with those of one process that nothing disturbed. A minute of two
cores.
"""

# ruff: noqa: T201 - printing is its output

import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import budgetfit
from budgetfit import Parallelism
from budgetfit.applying.run.run import Run
from tests.applying.ranks.test_many_ranks import batches
from tests.gloo_ranks import Started, on_ranks
from tests.integrations.tiny_training import plan_for, tiny_model

SAMPLES = 4  # in one update, as 1 micro-batch of each of 4 ranks, or 4 of one
UPDATES, KILLED_AFTER = 5, 3
RESUMED = (("fsdp2", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "fsdp2"))  # saved by, with
MOMENTUM = f"{__name__}.sgd_momentum"


def start(engine: str, ranks: int, kind: str = "gpt2", **settings: Any) -> Run:
    """A model with tied weights, without dropout."""
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    model = tiny_model(kind, **dropouts)
    several = None if ranks == 1 else Parallelism(engine=engine, gpus=ranks)
    plan = plan_for(
        model,
        batch_size=1,
        gradient_accumulation_steps=SAMPLES // ranks,
        parallelism=several,
        **settings,
    )
    if settings.get("optimizer") == MOMENTUM:
        return budgetfit.apply(plan, model, optimizer=sgd_momentum)
    return budgetfit.apply(plan, model, learning_rate=1e-2)


def sgd_momentum(trained: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained, lr=1e-2, momentum=0.9, weight_decay=0.1)


def train(run: Run, first: int, last: int) -> list[float]:
    """Mean losses of updates; each rank has its own samples of them."""
    losses = []
    ranks, rank = (1, 0) if run.ranks is None else (run.ranks.size, run.ranks.rank)
    for number in range(first, last):
        samples = batches(UPDATES)[number]
        ids = torch.cat([samples["input_ids"], samples["input_ids"][:1]])
        parts = [{"input_ids": row[None], "labels": row[None]} for row in ids]
        own = [float(run.step(part)) for part in parts[rank::ranks]]
        losses.append(sum(own) / len(own))
    assert run.updated
    return losses


def _train_until_killed(folder: str, engine: str) -> None:
    run = start(engine, 2)
    train(run, 0, KILLED_AFTER)
    assert run.state_dict().keys() >= {"model", "optimizer", "random"}
    dcp.save({"run": run}, checkpoint_id=f"{folder}/{engine}")
    Path(folder, f"{engine} {run.ranks.rank}").touch()
    train(run, KILLED_AFTER, UPDATES)
    time.sleep(60)  # until it is killed


def _resume(folder: str) -> list[list[float]]:
    """Go on from what either engine saved on 2 ranks, with the number there is now."""
    torch.distributed.init_process_group("gloo")  # a user's own
    found = []
    for saved, engine in RESUMED:
        run = start(engine, torch.distributed.get_world_size())
        dcp.load({"run": run}, checkpoint_id=f"{folder}/{saved}")
        assert run.steps_done == KILLED_AFTER
        found.append(train(run, KILLED_AFTER, UPDATES))
    return found


def killed_and_resumed(
    folder: Path,
) -> tuple[list[float], dict[tuple[int, str, str], list[float]]]:
    """Return the last losses of one process, and each rank's after it was resumed."""
    undisturbed = train(start("", 1), 0, UPDATES)[KILLED_AFTER:]
    for engine in ("fsdp2", "ddp"):
        started = Started(_train_until_killed, 2, str(folder), engine)
        wanted = [folder / f"{engine} {rank}" for rank in range(2)]
        while not all(each.exists() for each in wanted):
            time.sleep(0.05)
        started.processes[1].kill()
        started.processes[1].join()
        assert started.processes[1].exitcode == -signal.SIGKILL
        started.end()
    resumed = {
        (rank, *how): losses
        for rank, found in enumerate(on_ranks(_resume, 4, str(folder)))
        for how, losses in zip(RESUMED, found, strict=True)
    }
    return undisturbed, resumed


def main() -> None:
    """Print how far the losses of each way to resume are from the undisturbed ones."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, resumed = killed_and_resumed(Path(folder))
    for saved, engine in RESUMED:
        worst = max(
            abs(loss - expected)
            for rank in range(4)
            for loss, expected in zip(
                resumed[rank, saved, engine], undisturbed, strict=True
            )
        )
        print(
            f"saved by 2 ranks of {saved:5} after update {KILLED_AFTER}, resumed by 4 "
            f"of {engine:5}: losses at most {worst:.1e} from one process's"
        )


if __name__ == "__main__":
    main()
