"""Leave a model as it was found, whatever is measured with it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from budgetfit.core.random_generators import (
    HostGenerators,
    generator_state,
    is_generator,
    set_generator_state,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONTAINERS = (list, dict, set)
_OF_TORCH = frozenset(vars(nn.Module()))


@contextmanager
def kept_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give weights, buffers, gradients, modes and random generators back at the end.

    Attributes too: what a forward counts there is as before.

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
    """What a module's ``__dict__`` holds, what is in it, where generators stand."""

    module: nn.Module
    values: dict[str, Any]
    containers: list[tuple[Any, Any]]
    generators: list[tuple[Any, Any]]


def attributes_of(model: nn.Module) -> list[_Attributes]:
    """Return the attributes of all modules, their modes and counters among them."""
    return [
        _Attributes(
            module,
            dict(module.__dict__),
            [
                (value, value.copy())
                for name, value in module.__dict__.items()
                if type(value) in _CONTAINERS and name not in _OF_TORCH
            ],
            [
                (value, generator_state(value))
                for value in module.__dict__.values()
                if is_generator(value)
            ],
        )
        for module in model.modules()
    ]


def put_back_attributes(attributes: list[_Attributes]) -> None:
    """Let all modules have what ``attributes_of`` found."""
    for module, values, containers, generators in attributes:
        for name in module.__dict__.keys() - values.keys():
            del module.__dict__[name]
        module.__dict__.update(values)
        for container, content in containers:
            container.clear()
            extend = container.extend if isinstance(content, list) else container.update
            extend(content)
        for generator, state in generators:
            set_generator_state(generator, state)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
