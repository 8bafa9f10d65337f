"""Traverse nested Keras layers, with unique names for ``nn.Module`` attributes."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn


def is_whole(layer: Any) -> bool:
    """Whether a layer is a leaf: one of Keras's own and not a model."""
    return type(layer).__module__.startswith("keras.src.layers.")


def layers_in(layer: Any) -> list[Any]:
    """Return the direct sublayers of a layer, in order, without input layers."""
    # The functional graph inside a ``Sequential`` is skipped.
    graph = getattr(layer, "_functional", None)
    return [
        inner
        for inner in layer._layers
        if type(inner).__name__ != "InputLayer" and inner is not graph
    ]


def named_layers(layers: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield layers with unique names that are valid for submodules."""
    used: set[str] = set()
    for layer in layers:
        name = unused_name(_own_name(layer), used)
        yield name, layer


def _own_name(layer: Any) -> str:
    """Return a layer's name; an auto-generated one without its number."""
    # Keras numbers layers per process, so that the same model built twice would differ.
    name: str = layer.name
    made_up = re.sub(r"_\d+$", "", name)
    is_made_up = made_up.replace("_", "") == type(layer).__name__.lower()
    return made_up if is_made_up else name


def unused_name(name: str, used: set[str]) -> str:
    """Return a unique attribute name, and record it as used."""
    plain = name.replace(".", "_").replace("/", "_")
    found, number = plain, 1
    while found in used or hasattr(nn.Module, found):
        found, number = f"{plain}_{number}", number + 1
    used.add(found)
    return found


def seed_generators(layer: Any) -> list[Any]:
    """Return the seed generators of a layer and its sublayers."""
    return [
        generator
        for part in layer._flatten_layers()
        for generator in part._seed_generators
    ]
