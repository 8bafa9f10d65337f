"""Leave a model as it was found, whatever is measured with it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from budgetfit.utils.random_generators import (
    HostGenerators,
    generator_state,
    is_generator,
    set_generator_state,
)
from budgetfit.utils.user_code import CONTAINERS, globals_changed_by_any, refill

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_OF_TORCH = frozenset(vars(nn.Module()))


@contextmanager
def kept_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give weights, buffers, gradients, modes and random generators back at the end.

    Attributes and globals too: what a forward counts there is as before.

    The values wait in CPU memory, so that a card measures the run and not the copy.
    Gradients are set aside: a run would drop them.

    Args:
        model: Whose state is kept.
        device: Where it will run; its generator is kept besides the CPU's.
    """
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [tensor.grad for tensor in tensors]
    attributes = attributes_of(model)
    # bitsandbytes packs 4-bit weights anew where it computes without training on a CPU.
    scales = [
        (scale, dict(vars(scale)))
        for tensor in tensors
        if (scale := getattr(tensor, "quant_state", None)) is not None
    ]
    # A forward may put others in their place, or make them when the first batch comes.
    buffers = [(module, dict(module._buffers)) for module in model.modules()]  # noqa: SLF001
    cards = [_index(device)] if device.type == "cuda" else []
    generators = HostGenerators.now()  # speech models mask with numpy's
    for tensor in tensors:
        tensor.grad = None
    try:
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        generators.restore()
        for module, own in buffers:
            module._buffers.clear()  # noqa: SLF001
            module._buffers.update(own)  # noqa: SLF001
        with torch.no_grad():
            for tensor, value, gradient in zip(tensors, values, gradients, strict=True):
                if tensor.shape == value.shape:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value.to(tensor.device)
                tensor.grad = gradient
        for scale, facts in scales:
            vars(scale).clear()
            vars(scale).update(facts)
        put_back_attributes(attributes)


class _Attributes(NamedTuple):
    """What a ``__dict__`` holds, what is in it, where generators stand.

    Of globals only those that are said (``whole`` is False).
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
        """Note values of a place, and copies of the containers among them."""
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


def attributes_of(model: nn.Module) -> list[_Attributes]:
    """Return the attributes of all modules, their modes and counters among them.

    And the globals that their code sets or fills.
    """
    own = [
        _Attributes.of(vars(module), vars(module), _OF_TORCH)
        for module in model.modules()
    ]
    places: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for everything, name in globals_changed_by_any(map(type, model.modules())):
        if name in everything:
            _, some = places.setdefault(id(everything), (everything, {}))
            some[name] = everything[name]
    return own + [_Attributes.of(*each, whole=False) for each in places.values()]


def put_back_attributes(attributes: list[_Attributes]) -> None:
    """Let all modules have what ``attributes_of`` found."""
    for place, values, containers, generators, whole in attributes:
        for name in place.keys() - values.keys() if whole else ():
            del place[name]
        place.update(values)
        for container, content in containers:
            refill(container, content)
        for generator, state in generators:
            set_generator_state(generator, state)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
