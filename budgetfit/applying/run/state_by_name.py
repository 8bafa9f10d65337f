"""The state of a Run on several ranks, by parameters' names: for any number of them.

Made and loaded by ``torch.distributed.checkpoint.state_dict``, so that
``torch.distributed.checkpoint`` saves each rank's shards, and loads them again into
the shards of other numbers of ranks.
"""

import io
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from budgetfit.errors import InputError
from budgetfit.utils.lazy_import import lazy_import

State = dict[str, Any]

_WITHOUT = "without_state"  # names of the parameters whose states are none


def states_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[State, State]:
    """Return the states of model and optimizer; tensors are references."""
    # Both have entries for all parameters, or a checkpoint of shards could not be
    # loaded into a run in which others have a state. Of parameters that have none, as
    # without a gradient so far, states are made for it, and their names kept.
    new = [
        each
        for group in optimizer.param_groups
        for each in group["params"]
        if each.requires_grad and not optimizer.state.get(each)
    ]
    is_new = not optimizer.state
    weights, of_optimizer = _api().get_state_dict(model, optimizer)
    if is_new:
        optimizer.state.clear()  # torch has stepped it, at a learning rate of zero
    elif new:
        of_optimizer["state"] |= _new_states(model, optimizer, set(new))
    names = {item: name for name, item in model.named_parameters()}
    of_optimizer[_WITHOUT] = [names[each] for each in new]
    return weights, of_optimizer


def _new_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, of: set[nn.Parameter]
) -> State:
    """Return states as torch makes them, by names, for parameters that have none."""
    # It steps the optimizer, at a learning rate of zero: here one of these alone.
    kept = optimizer.state, optimizer.param_groups
    groups = [
        {**group, "params": [each for each in group["params"] if each in of]}
        for group in optimizer.param_groups
    ]
    try:
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [group for group in groups if group["params"]]
        made: State = _api().get_optimizer_state_dict(model, optimizer)
    finally:
        optimizer.state, optimizer.param_groups = kept
    return made["state"]


def is_by_name(state: State) -> bool:
    """Whether the state of an optimizer names parameters, instead of counting them."""
    return any(
        isinstance(name, str)
        for group in state["param_groups"]
        for name in group["params"]
    )


def check_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: State
) -> None:
    """Refuse the state of an optimizer over other parameters."""
    saved = [group["params"] for group in state["param_groups"]]
    own = [group["params"] for group in optimizer.param_groups]
    counts = [list(map(len, each)) for each in (saved, own)]
    same = counts[0] == counts[1]
    if same and is_by_name(state):
        same = list(map(set, saved)) == list(map(set, _names(model, optimizer)))
    if not same:
        raise InputError(
            f"This is the state of another optimizer: it has {counts[0]} parameters "
            f"in its groups, and this one has {counts[1]}. Train the same parameters "
            "in the same groups as when it was saved."
        )


def load_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: State, trained: State
) -> None:
    """Load states whose tensors are whole, or shards as those of the model are.

    ``trained``: state of the optimizer, by names or numbers of parameters. Some may be
    without state, or all, as those of plain SGD are.
    """
    if not is_by_name(trained):
        trained = _named(model, optimizer, trained)
    without = set(trained.get(_WITHOUT, ()))
    states = {name: x for name, x in trained["state"].items() if name not in without}
    trained = {"state": states, "param_groups": trained["param_groups"]}
    is_whole = not any(hasattr(item, "device_mesh") for item in weights.values())
    options = _api().StateDictOptions(full_state_dict=is_whole)
    _api().set_model_state_dict(model, weights, options=options)
    has_state = any(states.values())
    if not has_state or not optimizer.state:
        # Torch refuses whole states without a tensor, and it makes what it loads into
        # by a step, with the settings of the groups: SGD's momentum may be a saved one.
        _load_groups(optimizer, trained)
    if has_state:
        options = _api().StateDictOptions(full_state_dict=is_whole, strict=False)
        _api().set_optimizer_state_dict(model, optimizer, trained, options=options)
    for name, item in model.named_parameters():
        if name not in states:
            optimizer.state.pop(item, None)  # it was made only to be loaded into


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
    return torch.load(io.BytesIO(text), weights_only=True)


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
    for group, own in zip(state["param_groups"], _names(model, optimizer), strict=True):
        names |= dict(zip(group["params"], own, strict=True))
        groups.append({**group, "params": own})
    return {
        "state": {names[number]: item for number, item in state["state"].items()},
        "param_groups": groups,
    }
