"""Preserve a model: restore weights, buffers, gradients, modes and RNG state."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from budgetfit.utils.rng_state import (
    HostRngState,
    generator_state,
    is_generator,
    set_generator_state,
)
from budgetfit.utils.user_code import (
    CONTAINERS,
    mutated_globals_of_all,
    replace_contents,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# A forward may replace buffers, or create them with the first batch.
_OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}


@contextmanager
def preserved_model(
    model: nn.Module, device: torch.device, *, weights: bool = True
) -> Iterator[None]:
    """Restore weights, buffers, gradients, modes and random generators at the end.

    Also attributes and globals that a forward may change, such as counters.

    Copies are in CPU memory, so that they are not in the measured GPU memory. Gradients
    are set to None meanwhile.

    Args:
        model: The model to preserve.
        device: Its device; its generator is preserved besides the CPU's.
        weights: Whether parameters are copied, too; else nothing may change them.
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
    """Snapshot of a ``__dict__``: values, contents of containers, generator states.

    Of globals only the given names (``whole`` is False).
    """

    place: dict[str, Any]
    values: dict[str, Any]
    containers: list[tuple[Any, Any]]
    generators: list[tuple[Any, Any]]
    whole: bool

    @classmethod
    def of(
        cls,
        place: dict[str, Any],
        values: dict[str, Any],
        passed_over: Collection[str] = (),
        *,
        whole: bool = True,
    ) -> _Attributes:
        """Snapshot values of a ``__dict__``, with copies of containers."""
        return cls(
            place,
            dict(values),
            [
                (value, value.copy())
                for name, value in values.items()
                if type(value) in CONTAINERS and name not in passed_over
            ],
            [
                (value, generator_state(value))
                for value in values.values()
                if is_generator(value)
            ],
            whole,
        )


def snapshot_attributes(model: nn.Module) -> list[_Attributes]:
    """Snapshot the attributes of all modules, including modes and counters.

    Also the globals that their code sets or fills.
    """
    own = [
        _Attributes.of(vars(module), vars(module), _OF_TORCH)
        for module in model.modules()
    ]
    places: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for everything, name in mutated_globals_of_all(map(type, model.modules())):
        if name in everything:
            _, some = places.setdefault(id(everything), (everything, {}))
            some[name] = everything[name]
    return own + [_Attributes.of(*each, whole=False) for each in places.values()]


def restore_attributes(attributes: list[_Attributes]) -> None:
    """Restore the attributes and globals of ``snapshot_attributes``."""
    for place, values, containers, generators, whole in attributes:
        for name in place.keys() - values.keys() if whole else ():
            del place[name]
        place.update(values)
        for container, content in containers:
            replace_contents(container, content)
        for generator, state in generators:
            set_generator_state(generator, state)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
