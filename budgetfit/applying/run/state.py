"""Save and load the training state of a Run (``state_dict``)."""

import dataclasses
from typing import Any, Protocol

import torch
from torch import nn

from budgetfit.applying.ranks import Ranks
from budgetfit.applying.run.accumulation import AccumulatedGradients, AccumulationGroup
from budgetfit.applying.run.rng_states import get_rng_states, set_rng_states
from budgetfit.applying.run.state_by_name import (
    check_groups,
    is_by_name,
    load_by_name,
    rank_states_from_bytes,
    rank_states_to_bytes,
    states_by_name,
)
from budgetfit.applying.zero import ZeroOptimizer
from budgetfit.errors import InputError

_NEEDED = {"model", "optimizer", "scaler"}
_CLASS = "optimizer_class"


class Resumable(Protocol):
    """The attributes of a ``Run`` that are saved."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    trained: list[nn.Parameter]
    device: torch.device
    steps_done: int
    skipped_steps: int
    group: AccumulationGroup
    accumulated: AccumulatedGradients
    ranks: Ranks | None

    def drop_group(self) -> None:
        """Drop the micro-batches since the last update."""


def refuse_engine(run: Resumable) -> None:
    """Refuse DeepSpeed, whose engine has the weights and states."""
    if isinstance(run.optimizer, ZeroOptimizer):
        raise InputError(
            "DeepSpeed saves and loads by itself: run.engine.save_checkpoint(folder), "
            "run.engine.load_checkpoint(folder), on every rank."
        )


def save_state(run: Resumable) -> dict[str, Any]:
    """Return all that the next step depends on, except data and settings.

    Tensors are references, as in a model's ``state_dict``. Of several ranks each calls
    this, and gets its own shards.

    Raises:
        InputError: If micro-batches wait for an update of several ranks, or DeepSpeed
            trains.
    """
    refuse_engine(run)
    state = {
        _CLASS: type(run.optimizer).__name__,
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "steps": {"done": run.steps_done, "skipped": run.skipped_steps},
    }
    random = get_rng_states(run.device)
    if run.ranks is None:
        waits = run.group.count > 0
        return {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            **state,
            "group": dataclasses.asdict(run.group),
            "gradients": [item.grad for item in run.trained] if waits else None,
            "random": random,
        }
    if run.group.count:
        raise InputError(
            f"{run.group.count} micro-batches wait for an update, and their gradients "
            "are not reduced over the ranks yet. Save when run.updated is True, or "
            "call run.flush() first."
        )
    weights, of_optimizer = states_by_name(run.model, run.optimizer)
    return {
        "model": weights,
        "optimizer": of_optimizer,
        **state,
        "random": rank_states_to_bytes(run.ranks.gather(random)),
    }


def load_state(run: Resumable, state: dict[str, Any], *, random: bool) -> None:
    """Load what ``save_state`` returned, in this version or an older one.

    Raises:
        InputError: If it is no state of this run; nothing is loaded then.
    """
    refuse_engine(run)
    missing = _NEEDED - set(state)
    if missing:
        raise InputError(
            f"This is no state of a Run: {sorted(missing)} is missing. "
            "Use what run.state_dict() returned."
        )
    # torch.distributed.checkpoint drops empty mappings, such as plain SGD's state.
    state = {**state, "optimizer": {"state": {}, **state["optimizer"]}}
    by_name = _check_state(run, state)
    run.drop_group()
    if by_name:
        load_by_name(run.model, run.optimizer, state["model"], state["optimizer"])
    else:
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
    if run.scaler is not None and state["scaler"] is not None:
        run.scaler.load_state_dict(state["scaler"])
    steps = state.get("steps", {})
    run.steps_done, run.skipped_steps = steps.get("done", 0), steps.get("skipped", 0)
    gradients = state.get("gradients")
    if gradients is not None:
        factor = _own_scale(run, state) / _saved_scale(state)
        for parameter, gradient in zip(run.trained, gradients, strict=True):
            if gradient is not None:
                # In the wider dtype, where a scale of fp16-mixed does not overflow. A
                # new tensor: the next micro-batch accumulates in place.
                wide = torch.promote_types(gradient.dtype, parameter.dtype)
                parameter.grad = (gradient.to(wide) * factor).to(parameter)
        run.group = AccumulationGroup(**state["group"])
        run.accumulated.record()
    if random and "random" in state:
        rank, size = (0, 1) if run.ranks is None else (run.ranks.rank, run.ranks.size)
        saved = state["random"]
        states = rank_states_from_bytes(saved) if isinstance(saved, bytes) else [saved]
        if len(states) == size:  # of another number of ranks there are none
            set_rng_states(states[rank], run.device)


def _check_state(run: Resumable, state: dict[str, Any]) -> bool:
    """Refuse what is no state of this run; return whether to load it by names."""
    _check_model(run.model, state["model"])
    _check_class(run.optimizer, state.get(_CLASS))
    gradients = state.get("gradients")
    if gradients is not None and run.ranks is not None:
        raise InputError(
            "This state has the gradients of micro-batches that wait for an update of "
            f"one GPU, and {run.ranks.size} train here. Save it when run.updated is "
            "True."
        )
    if gradients is not None:
        _check_unscales(run, state)
    check_groups(run.model, run.optimizer, state["optimizer"])
    return run.ranks is not None or is_by_name(state["optimizer"])


def _saved_scale(state: dict[str, Any]) -> float:
    """Return the factor that saved gradients have of a GradScaler; 1 without one."""
    return state["scaler"]["scale"] if state["scaler"] is not None else 1.0


def _own_scale(run: Resumable, state: dict[str, Any]) -> float:
    """Return the factor that gradients have in this run, which loads the state."""
    if run.scaler is None:
        return 1.0
    # A scaler continues with the saved scale.
    return run.scaler.get_scale() if state["scaler"] is None else _saved_scale(state)


def _check_unscales(run: Resumable, state: dict[str, Any]) -> None:
    """Refuse gradients that overflowed where no GradScaler would skip their update."""
    if run.scaler is not None or state["scaler"] is None:
        return
    if not all(
        item is None or item.to_dense().isfinite().all() for item in state["gradients"]
    ):
        raise InputError(
            "The gradients in this state overflowed at a loss scale of "
            f"{_saved_scale(state):,.0f}: a GradScaler skips that update, and this run "
            "has none. Load it into a run with fp16-mixed, or use a state saved when "
            "run.updated was True."
        )


def _check_model(model: nn.Module, state: dict[str, Any]) -> None:
    """Refuse the state of another model before anything is loaded."""
    own = model.state_dict()
    for name in (*own, *state):
        if name not in own or name not in state:
            where = "the state" if name in own else "the model"
            raise InputError(
                f"This is the state of another model: {where} has no {name!r}. Load it "
                "into the model that it was saved from."
            )
        shapes = [getattr(each[name], "shape", None) for each in (own, state)]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"This is the state of another model: {name!r} is "
                f"{list(shapes[1] or ())} in the state and {list(shapes[0] or ())} in "
                "the model. Build the model as it was when it was saved."
            )


def _check_class(optimizer: torch.optim.Optimizer, saved_class: str | None) -> None:
    """Refuse the state of another optimizer; older states do not say their class."""
    own_class = type(optimizer).__name__
    if saved_class is not None and saved_class != own_class:
        raise InputError(
            f"This is the state of another optimizer: it was saved from {saved_class}, "
            f"and this run trains with {own_class}. Plan with the optimizer that it "
            "was saved from, or load state['model'] into the model before you apply."
        )
