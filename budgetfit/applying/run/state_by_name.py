"""The state of a Run on several ranks, by parameters' names: for any number of them.

Made and loaded by ``torch.distributed.checkpoint.state_dict``, so that
``torch.distributed.checkpoint`` saves each rank's shards, and loads them again into
the shards of other numbers of ranks.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from budgetfit.errors import InputError
from budgetfit.utils.lazy_import import lazy_import

if TYPE_CHECKING:
    from torch import nn

State = dict[str, Any]


def states_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[State, State]:
    """Return the states of model and optimizer; tensors are references.

    Where the optimizer has no state yet, what would be loaded into is made for it.
    """
    is_new = not optimizer.state
    weights, of_optimizer = _api().get_state_dict(model, optimizer)
    if is_new:
        optimizer.state.clear()  # torch has stepped it, at a learning rate of zero
    return weights, of_optimizer


def is_by_name(state: State) -> bool:
    """Whether the state of an optimizer names parameters, instead of counting them."""
    return any(
        isinstance(name, str)
        for group in state["param_groups"]
        for name in group["params"]
    )


def load_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: State, trained: State
) -> None:
    """Load states whose tensors are whole, or shards as those of the model are.

    Args:
        model: Sharded or not.
        optimizer: Over its parameters.
        weights: State of the model.
        trained: State of the optimizer, by names or numbers of parameters. Its
            parameters may all be without state, as those of plain SGD are.

    Raises:
        InputError: If the optimizer trains other parameters.
    """
    if not is_by_name(trained):
        trained = _named(model, optimizer, trained)
    _check_names(model, optimizer, trained)
    is_whole = not any(hasattr(item, "device_mesh") for item in weights.values())
    options = _api().StateDictOptions(full_state_dict=is_whole)
    _api().set_model_state_dict(model, weights, options=options)
    has_state = any(trained["state"].values())
    if not has_state or not optimizer.state:
        # Torch refuses whole states without a tensor, and it makes what it loads into
        # by a step, with the settings of the groups: SGD's momentum may be a saved one.
        _load_groups(optimizer, trained)
    if has_state:
        _api().set_optimizer_state_dict(model, optimizer, trained, options=options)


def _load_groups(optimizer: torch.optim.Optimizer, trained: State) -> None:
    """Load the groups' settings, such as learning rates, and no state."""
    numbered = optimizer.state_dict()["param_groups"]
    groups = [
        {**saved, "params": own["params"]}
        for saved, own in zip(trained["param_groups"], numbered, strict=True)
    ]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})


def rank_states_to_bytes(states: list[State]) -> bytes:
    """Return all ranks' random states as one value, whatever the number of ranks."""
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def rank_states_from_bytes(text: bytes) -> list[State]:
    """Return what ``rank_states_to_bytes`` was given."""
    states: list[State] = torch.load(io.BytesIO(text), weights_only=True)
    return states


def _api() -> Any:
    """Return torch's module, which takes a second to import."""
    return lazy_import("torch.distributed.checkpoint.state_dict")


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each of the optimizer's groups."""
    names = {item: name for name, item in model.named_parameters()}
    return [
        [names[item] for item in group["params"]] for group in optimizer.param_groups
    ]


def _named(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> State:
    """Return the state of an optimizer by names, of one by numbers."""
    names: dict[int, str] = {}
    groups = []
    for group, own in zip(
        state["param_groups"], _names(model, optimizer), strict=False
    ):
        names |= dict(zip(group["params"], own, strict=False))
        groups.append({**group, "params": own[: len(group["params"])]})
    return {
        "state": {names[number]: item for number, item in state["state"].items()},
        "param_groups": groups,
    }


def _check_names(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: State
) -> None:
    own = _names(model, optimizer)
    saved = [list(group["params"]) for group in state["param_groups"]]
    if list(map(set, own)) != list(map(set, saved)):
        counts = [list(map(len, each)) for each in (saved, own)]
        raise InputError(
            f"This is the state of another optimizer: it has {counts[0]} parameters "
            f"in its groups, and this one has {counts[1]}. Train the same parameters "
            "in the same groups as when it was saved."
        )
