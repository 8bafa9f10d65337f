"""Preserve a model: restore weights, buffers, gradients, modes and RNG state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from budgetfit.utils.mutable_state import HeldState, class_attributes, mutable_state
from budgetfit.utils.mutated_globals import mutated_outside
from budgetfit.utils.rng_state import HostRngState

# A forward may replace buffers, or create them with the first batch.
_OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}
# transformers hooks modules in the first forward that collects their outputs, and notes
# in an attribute that it has: without the attribute it would hook them once more.
_HOOKS = frozenset(name for name in _OF_TORCH if "_hooks" in name)


@contextmanager
def preserved_model(
    model: nn.Module, device: torch.device, *, weights: bool = True
) -> Iterator[None]:
    """Restore weights, buffers, gradients, modes and random generators at the end.

    Also attributes and globals that a forward may change, such as counters.

    Copies are in CPU memory, so that they are not in the measured GPU memory. Gradients
    are set to None meanwhile.

    ``device``: the model's; its generator is preserved besides the CPU's. ``weights``:
    whether parameters are copied, too; else nothing may change them.
    """
    tensors = [*model.parameters(), *model.buffers()] if weights else [*model.buffers()]
    values = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [(tensor, tensor.grad) for tensor in (*model.parameters(), *tensors)]
    attributes = snapshot_attributes(model)
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
                if tensor.shape == value.shape:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value.to(tensor.device)
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for scale, facts in scales:
            vars(scale).clear()
            vars(scale).update(facts)
        restore_attributes(attributes)


class _Attributes(NamedTuple):
    """Snapshot: places of attributes and globals, and what their objects held.

    Of globals only some names are of interest (``whole`` is False). ``hooks``: of the
    modules.
    """

    places: list[tuple[dict[str, Any], dict[str, Any], bool]]
    hooks: list[tuple[dict[int, Any], dict[int, Any]]]
    state: list[HeldState]


def snapshot_attributes(model: nn.Module) -> _Attributes:
    """Snapshot the attributes of all modules, including modes, counters and hooks.

    Also the globals that their code sets or fills, and attributes of their classes.
    """
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


def restore_attributes(attributes: _Attributes) -> None:
    """Restore the attributes and globals of ``snapshot_attributes``."""
    for place, values, whole in attributes.places:
        for name in place.keys() - values.keys() if whole else ():
            del place[name]
        place.update(values)
    for hooks, before in attributes.hooks:
        if hooks.keys() != before.keys():
            hooks.clear()
            hooks.update(before)
    for held in attributes.state:
        held.restore()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
