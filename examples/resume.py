"""Train by a plan, and go on after a crash as if nothing had happened.

    python examples/resume.py --folder run --steps 60
    python examples/resume.py --folder run --steps 60    # again, after a kill

What the next step depends on is saved every few steps: run.state_dict() (model,
optimizer, GradScaler, random generators, counts), the scheduler, and where in the data
it was. The plan is kept beside it, so that the same settings go on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import transformers

import budgetfit

LENGTH, VOCABULARY, SAMPLES = 32, 64, 96


def main() -> None:
    """Start, or go on from the last save."""
    options = parse_options()
    options.folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = make_model()
    plan = plan_for(model, options.folder / "plan.json")
    data = make_data()
    with budgetfit.apply(plan, model.to(device), optimizer=make_optimizer) as run:
        scheduler = transformers.get_cosine_schedule_with_warmup(
            run.optimizer, num_warmup_steps=5, num_training_steps=options.steps
        )
        position = load(options.folder / "state.pt", run, scheduler)
        while position < options.steps:
            batch = batch_at(position, data, plan.recipe.effective_batch_size)
            losses = [
                float(run.step(part, max_grad_norm=1.0)) for part in run.parts(batch)
            ]
            if run.updated:  # not if a GradScaler has skipped the step
                scheduler.step()
            position += 1
            print(f"step {position} loss {sum(losses) / len(losses)!r}", flush=True)
            if position % options.save_every == 0:
                save(options.folder / "state.pt", run, scheduler, position)


def plan_for(model: torch.nn.Module, path: Path) -> budgetfit.Plan:
    """Plan once; later starts train by the same plan."""
    if path.exists():
        return budgetfit.Plan.load(path)
    plan = budgetfit.plan(
        model,
        gpu="rtx-4090",
        max_length=LENGTH,
        precision="fp32",
        batch_size=4,
        effective_batch_size=8,
        checkpointing="full",
        optimizer=make_optimizer,
    )
    plan.save(path)
    return plan


def save(path: Path, run: budgetfit.Run, scheduler: Any, position: int) -> None:  # noqa: ANN401
    """Write the state so that a crash in the middle leaves the one before."""
    state = {
        "run": run.state_dict(),
        "scheduler": scheduler.state_dict(),
        "position": position,
    }
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)  # in one step, or not at all


def load(path: Path, run: budgetfit.Run, scheduler: Any) -> int:  # noqa: ANN401
    """Go on from what was saved; return the position in the data."""
    if not path.exists():
        return 0
    # On the CPU first: a second copy of everything would not fit on the card.
    state = torch.load(path, map_location="cpu", weights_only=True)
    run.load_state_dict(state["run"])
    scheduler.load_state_dict(state["scheduler"])
    return state["position"]


def batch_at(position: int, data: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """Return a batch that depends on the position alone: each epoch has its order."""
    epoch, number = divmod(position, len(data) // size)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    ids = data[order[number * size : (number + 1) * size]]
    return {"input_ids": ids, "labels": ids}


def make_data() -> torch.Tensor:
    """Return sequences that can be learnt."""
    starts = torch.randint(
        VOCABULARY, (SAMPLES, 1), generator=torch.Generator().manual_seed(1)
    )
    return (starts + torch.arange(LENGTH)) % VOCABULARY


def make_model() -> torch.nn.Module:
    """Return a small GPT-2, with dropout: it draws random numbers in every step."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_layer=3,
        n_embd=48,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with a learning rate for training from nothing."""
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


def parse_options() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where to save")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
