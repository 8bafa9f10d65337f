"""What planning, applying and verifying must leave as they found it."""

import contextlib
import random
import types
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)


@contextlib.contextmanager
def unchanged(
    model: nn.Module, besides: AbstractSet[str] = frozenset()
) -> Iterator[None]:
    """Assert that the body leaves the process and the model, values too, alone."""
    before = process_state() | model_state(model) | model_values(model)
    yield
    after = process_state() | model_state(model) | model_values(model)
    assert_same(before, after, besides)


def assert_same(
    before: dict[str, Any],
    after: dict[str, Any],
    besides: AbstractSet[str] = frozenset(),
) -> None:
    """Assert that two states are equal; what differs is named.

    ``besides``: what the model's own forward changes.
    """
    changed = sorted(different(before, after) - besides)
    assert not changed, f"changed: {', '.join(changed[:4])}"


def different(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the names of what differs."""
    changed = {name for name in before if not _equal(before[name], after.get(name))}
    return changed | (after.keys() - before.keys())


def own_attributes(model: nn.Module, forward: Callable[[], object]) -> set[str]:
    """Return the attributes that the model's own forward changes."""
    before = model_state(model)
    forward()
    return {name for name in different(before, model_state(model)) if " in " in name}


def process_state() -> dict[str, Any]:
    """Return the global switches and random states that torch and others have."""
    return random_state() | switches()


def random_state() -> dict[str, Any]:
    """Return the states of the global generators, which a training step moves on."""
    return {
        "torch's random state": torch.get_rng_state(),
        "numpy's random state": str(np.random.get_state()),  # noqa: NPY002
        "random's state": random.getstate(),
    }


def switches() -> dict[str, Any]:
    """Return the global switches that no training step may turn."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
    }


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return all of a model but its values: objects, flags, hooks, attributes."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        name = path or "the model"
        state[f"training of {name}"] = module.training
        for key, value in vars(module).items():
            # transformers keeps a flag of such a name beside the hooks themselves
            is_hooks = key.endswith("_hooks") or "_hooks_" in key
            if is_hooks and isinstance(value, Mapping):
                state[f"{key} of {name}"] = [id(hook) for hook in value.values()]
        state[f"forward of {name}"] = module.__dict__.get("forward")
        state[f"class of {name}"] = type(module)
        state |= _attributes(name, module)
    for kind in {type(module) for module in model.modules()}:
        # Libraries add to nn.Module itself when they are imported.
        for parent in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            state[f"class {parent.__qualname__}"] = {
                key: id(value)
                for key, value in vars(parent).items()
                if key != "__slotnames__"  # what copying an object keeps for the next
            }
    for name, tensor in model.named_parameters(remove_duplicate=False):
        state[name] = (
            id(tensor),
            type(tensor),
            tensor.requires_grad,
            tensor.dtype,
            tensor.device,
            tensor.grad,
            *(
                tuple(id(hook) for hook in (getattr(tensor, hooks) or {}).values())
                for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")
            ),
        )
        state |= _attributes(name, tensor)
    for name, tensor in model.named_buffers(remove_duplicate=False):
        state[name] = (tensor.dtype, tensor.device, tensor.shape)
    state["config"] = str(getattr(model, "config", None))
    return state


def _attributes(name: str, owner: object) -> dict[str, Any]:
    """Return what an object's own attributes are, each by its name.

    Plain values are compared by value, all else as the object that it is, and what has
    a length by that, too: a list may have been added to.
    """
    state: dict[str, Any] = {}
    for key, value in vars(owner).items():
        plain = value is None or isinstance(value, _PLAIN)
        state[f"{key} in {name}"] = value if plain else _identity(value)
    return state


def _identity(value: object) -> object:
    if isinstance(value, dict):
        return id(value), list(value)
    if isinstance(value, (list, tuple, set)):
        return type(value), len(value), [id(each) for each in value]
    if isinstance(value, types.MethodType):  # a new object at each access
        return id(value.__self__), id(value.__func__)
    return type(value), id(value)


def model_values(model: nn.Module) -> dict[str, Any]:
    """Return copies of parameters and buffers; what is on meta has no values."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {
        f"values of {name}": tensor.detach().clone()
        for name, tensor in tensors
        if not tensor.is_meta
    }


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(
            one.nan_to_num(), other.nan_to_num()
        )
    return bool(one == other)
