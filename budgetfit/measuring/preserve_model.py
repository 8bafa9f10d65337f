"""Preserve a model: restore weights, buffers, gradients, modes and RNG state.

And what its loss and its hooks hold: counters, running means, generators.
"""

import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from budgetfit.utils.mutable_state import (
    HeldState,
    class_attributes,
    leaves,
    mutable_state,
)
from budgetfit.utils.mutated_globals import mutated_outside
from budgetfit.utils.rng_state import HostRngState
from budgetfit.utils.user_code import function_of, is_library, users_hooks

# A forward may replace buffers, or create them with the first batch.
_OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}
# transformers hooks modules in the first forward that collects their outputs, and notes
# in an attribute that it has: without the attribute it would hook them once more.
_HOOKS = frozenset(name for name in _OF_TORCH if "_hooks" in name)
# A loss or hook that leads to a data set has far more objects than it changes.
_MOST_OBJECTS: Final = 2**16
_MOST_BYTES: Final = 2**28  # of a tensor outside modules; larger ones are data
_HOOKS_OF_BACKWARDS: Final = ("_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def preserved_model(
    model: nn.Module, device: torch.device, *, weights: bool = True, loss: object = None
) -> Iterator[None]:
    """Restore weights, buffers, gradients, modes and random generators at the end.

    Also attributes and globals that a forward may change, such as counters, and what
    the loss and the hooks change.

    Copies are in CPU memory, so that they are not in the measured GPU memory. Gradients
    are set to None meanwhile.

    ``device``: the model's; its generator is preserved besides the CPU's. ``weights``:
    whether parameters are copied, too; else nothing may change them. ``loss``: the
    user's own, if there is one.
    """
    tensors = [*model.parameters(), *model.buffers()] if weights else [*model.buffers()]
    values = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [(tensor, tensor.grad) for tensor in (*model.parameters(), *tensors)]
    attributes = snapshot_attributes(model)
    restore_outside = snapshot_outside(model, loss)
    # bitsandbytes repacks 4-bit weights for inference on a CPU.
    scales = [
        (scale, dict(vars(scale)))
        for tensor in tensors
        if (scale := getattr(tensor, "quant_state", None)) is not None
    ]
    cards = [_index(device)] if device.type == "cuda" else []
    generators = HostRngState.now()  # speech models mask with numpy's
    for tensor, _ in gradients:
        tensor.grad = None
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        generators.restore()
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                _write_back(tensor, value)
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for scale, facts in scales:
            vars(scale).clear()
            vars(scale).update(facts)
        attributes.restore()
        restore_outside()


class _Attributes(NamedTuple):
    """Snapshot: places of attributes and globals, and what their objects held.

    Of globals only some names are of interest (``whole`` is False). ``hooks``: of the
    modules.
    """

    places: list[tuple[dict[str, Any], dict[str, Any], bool]]
    hooks: list[tuple[dict[int, Any], dict[int, Any]]]
    state: list[HeldState]

    def restore(self) -> None:
        """Restore the attributes and globals."""
        for place, values, whole in self.places:
            for name in place.keys() - values.keys() if whole else ():
                del place[name]
            place.update(values)
        for hooks, before in self.hooks:
            if hooks.keys() != before.keys():
                hooks.clear()
                hooks.update(before)
        for held in self.state:
            held.restore()


def snapshot_attributes(model: nn.Module) -> _Attributes:
    """Snapshot the attributes of all modules, including modes, counters and hooks."""
    # Also the globals that their code sets or fills, and attributes of their classes.
    kinds = list(dict.fromkeys(map(type, model.modules())))
    places = [(vars(module), dict(vars(module)), True) for module in model.modules()]
    hooks = [
        (held, dict(held))
        for _, values, _ in places
        for name, held in values.items()
        if name in _HOOKS and isinstance(held, dict)
    ]
    roots = [
        item
        for _, values, _ in places
        for item in values.items()
        if item[0] not in _OF_TORCH
    ]
    outside = mutated_outside(kinds)
    roots += [(each.__qualname__, each) for each in outside.functions]
    for everything, name in outside.globals:
        if name in everything:
            places.append((everything, {name: everything[name]}, False))
            roots.append((name, everything[name]))
    state = mutable_state(roots, classes=class_attributes(kinds))
    return _Attributes(places, hooks, list(state))


def snapshot_outside(model: nn.Module, loss: object) -> Callable[[], None]:
    """Return a function that restores what a loss and the user's hooks hold now.

    Objects, closures and globals that their code leads to, the modules among these that
    are not the model's, and all tensors in them.
    """
    code = [*([] if loss is None else [loss]), *_hooks_of(model)]
    kinds = [type(each) for each in code]
    outside = mutated_outside(kinds, map(function_of, code))
    places = [
        (everything, name, everything[name])
        for everything, name in outside.globals
        if name in everything
    ]
    roots = [("", each) for each in (*code, *outside.functions)]
    roots += [(name, value) for _, name, value in places]
    classes = class_attributes(kinds)
    state = [*mutable_state(roots, classes=classes, limit=_MOST_OBJECTS)]
    held = [value for _, value in roots], *(each.items() for each in state)
    found = [
        each
        for each in leaves([*itertools.chain(*held)], limit=_MOST_OBJECTS)
        if isinstance(each, (nn.Module, torch.Tensor))
    ]
    own = set(model.modules())
    modules = [
        each
        for each in dict.fromkeys(found)
        if isinstance(each, nn.Module) and own.isdisjoint(each.modules())
    ]
    attributes = [snapshot_attributes(each) for each in modules]
    loose = [each for each in found if isinstance(each, torch.Tensor)]
    of_modules = [[*each.parameters(), *each.buffers()] for each in modules]
    own_tensors = {*map(id, itertools.chain(model.parameters(), model.buffers()))}
    held_tensors = [
        each
        for each in dict.fromkeys(itertools.chain(loose, *of_modules))
        if id(each) not in own_tensors
    ]
    data = {id(each) for each in loose if each.nbytes > _MOST_BYTES}
    data -= {*map(id, itertools.chain(*of_modules))}
    tensors = [
        (each, each.detach().to("cpu", copy=True))
        for each in held_tensors
        if id(each) not in data and _can_be_written(each)
    ]
    gradients = [(each, each.grad) for each in held_tensors if each.is_leaf]
    for each, _ in gradients:
        each.grad = None

    def restore() -> None:
        for everything, name, value in places:
            everything[name] = value
        for held_state in state:
            held_state.restore()
        for of_module in attributes:
            of_module.restore()
        for tensor, value in tensors:
            if not torch.equal(tensor.detach().cpu(), value):
                _write_back(tensor, value)
        for tensor, gradient in gradients:
            tensor.grad = gradient

    return restore


def _write_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.shape == value.shape:
        tensor.data.copy_(value)
    else:
        tensor.data = value.to(tensor.device)


def _can_be_written(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_inference()
        and not is_traceable_wrapper_subclass(tensor)
    )


def _hooks_of(model: nn.Module) -> list[Any]:
    """Return the user's hooks: of forwards, backwards and gradients."""
    modules = [*model.modules()]
    tables = [vars(module)[name] for module in modules for name in _HOOKS_OF_BACKWARDS]
    tables += [
        getattr(parameter, name) or {}
        for parameter in model.parameters()
        for name in _HOOKS_OF_TENSORS
    ]
    found = [hook for table in tables for hook in table.values()]
    return users_hooks(modules) + [
        hook
        for hook in found
        if isinstance(hook, types.BuiltinMethodType)  # such as gradients.append
        or not is_library(getattr(function_of(hook), "__module__", None) or "builtins")
    ]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
