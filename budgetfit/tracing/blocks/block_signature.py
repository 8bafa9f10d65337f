"""What two blocks must share to leave the same events: a signature of their structure.

Compared are the classes and paths of all modules in a block, shapes, strides, dtypes
and gradients of its tensors, training flags, hooks, and every plain attribute. What is
no plain value must be the very same object. A number that grows by one from block to
block is its place in the row and tells nothing (``layer_idx``).
"""

from __future__ import annotations

import enum
import functools
import types
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from budgetfit.tracing.blocks.find_blocks import CONTAINERS

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_HELD_APART = ("_modules", "_parameters", "_buffers")
_DEEPEST = 5  # objects in objects; below that only the same object is the same


class Place(NamedTuple):
    """Where a block stands: the path of its list, and which child of that it is."""

    container: str
    position: int


class Block(NamedTuple):
    """A block that may be one of many: where it stands and what it is."""

    place: Place
    kind: Hashable


def block_kinds(model: nn.Module, blocks: Sequence[str]) -> dict[str, Block]:
    """Return the blocks that stand in a list and own their tensors, with their kinds.

    Two blocks of one list with the same kind differ in nothing that can be seen.
    """
    modules = dict(model.named_modules())
    lists = [(path, values) for path, _, values in lists_outside(model, blocks)]
    rows: dict[str, dict[str, Any]] = {}
    places: dict[str, Place] = {}
    for name in _blocks_without_shared_tensors(model, modules, blocks):
        container, _, key = name.rpartition(".")
        parent = modules[container]
        if not isinstance(parent, CONTAINERS):
            continue
        place = places[name] = Place(container, list(parent._modules).index(key))
        rows[name] = dict(_facts(modules[name]))
        for path, values in lists:  # what a loop asks about its next block
            if len(values) == len(parent):
                rows[name][f"[{path}]"] = values[place.position]
    counted = _places_in_the_row(rows, places)
    numbers: dict[Hashable, int] = {}
    result = {}
    for name, row in rows.items():
        kind = tuple(
            (key, "place", places[name].position - value)
            if (places[name].container, key) in counted
            else (key, value)
            for key, value in row.items()
        )
        result[name] = Block(places[name], numbers.setdefault(kind, len(numbers)))
    return result


def lists_outside(
    model: nn.Module, blocks: Sequence[str]
) -> Iterator[tuple[str, tuple[object, str], list[Any] | tuple[Any, ...]]]:
    """Yield path, (holder, attribute) and values of lists of plain values.

    They are those of modules outside ``blocks`` and of their configurations, such as
    ``config.layer_types``, which may hold an entry for each block.
    """
    inside = tuple(f"{name}." for name in blocks)
    seen: set[int] = set()
    for path, module in model.named_modules():
        if f"{path}.".startswith(inside) and blocks:
            continue
        for holder in _settings_of(module):
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            for name, value in vars(holder).items():
                if (
                    isinstance(value, (list, tuple))
                    and value
                    and all(isinstance(item, _PLAIN) for item in value)
                ):
                    where = f"{path}: {type(holder).__name__}.{name}"
                    yield where, (holder, name), value


def _settings_of(module: nn.Module) -> Iterator[object]:
    """Yield the module and what it is configured by."""
    yield module
    for name, value in vars(module).items():
        if name.endswith("config") and hasattr(value, "__dict__"):
            yield value


def _blocks_without_shared_tensors(
    model: nn.Module, modules: dict[str, nn.Module], blocks: Sequence[str]
) -> list[str]:
    def held(module: nn.Module) -> set[int]:
        tensors = (*module.parameters(), *module.buffers())
        return {id(tensor) for tensor in tensors}

    everything = Counter(
        id(tensor)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )
    result = []
    for name in blocks:
        block = modules.get(name)
        if block is None or not name:
            continue
        inside = Counter(
            id(tensor)
            for module in block.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        )
        if all(everything[key] == inside[key] for key in held(block)):
            result.append(name)
    return result


def _places_in_the_row(
    rows: dict[str, dict[str, Any]], places: dict[str, Place]
) -> set[tuple[str, str]]:
    """Return the attributes, by container, that only say where a block stands."""
    offsets: dict[tuple[str, str], list[int | None]] = defaultdict(list)
    for name, row in rows.items():
        container, position = places[name]
        for key, value in row.items():
            offset = position - value if type(value) is int else None
            offsets[container, key].append(offset)
    return {
        key
        for key, found in offsets.items()
        if len(found) > 1 and None not in found and len(set(found)) == 1
    }


def _facts(block: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """Yield everything about a block that can be compared, by path and name."""
    inside = {id(module): path for path, module in block.named_modules()}
    for path, module in block.named_modules():
        yield f"{path}:", (type(module), tuple(module._modules))
        tensors = (*module._parameters.items(), *module._buffers.items())
        for name, tensor in tensors:
            yield f"{path}:{name}", None if tensor is None else _tensor(tensor)
        for name, value in vars(module).items():
            if name in _HELD_APART:
                continue
            if isinstance(value, dict) and name.endswith(("hooks", "kwargs")):
                value = list(value.values())  # noqa: PLW2901 - keys count up everywhere
            yield f"{path}.{name}", _fact(value, inside, ())


def _tensor(tensor: torch.Tensor) -> Hashable:
    return (
        type(tensor),
        tuple(tensor.shape),
        tensor.layout,
        tensor.stride() if tensor.layout is torch.strided else (),
        tensor.dtype,
        tensor.requires_grad,
    )


def _fact(value: object, inside: dict[int, str], above: tuple[int, ...]) -> Hashable:  # noqa: PLR0911 - one kind of value each
    """Return what to compare of any value; ``above`` are the objects that hold it."""
    if type(value) is int:
        return value
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, nn.Module):
        return "module", inside.get(id(value), id(value))
    if id(value) in above or len(above) > _DEEPEST:
        return "object", id(value)
    look = functools.partial(_fact, inside=inside, above=(*above, id(value)))
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, enum.Enum):
        return type(value), value.name
    if isinstance(value, dict):
        return type(value), tuple((look(k), look(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(look, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(look, value))
    return _object(value, look)


def _object(value: object, look: functools.partial[Hashable]) -> Hashable:
    if isinstance(value, types.MethodType):
        return "method", id(value.__func__), look(value.__self__)
    if isinstance(value, functools.partial):
        return "partial", look(value.func), look(value.args), look(value.keywords)
    if isinstance(value, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        kept = (cells, value.__defaults__, value.__kwdefaults__)
        return "function", id(value.__code__), look(kept)
    if isinstance(value, type) or not hasattr(value, "__dict__") or _is_shared(value):
        return "object", id(value)
    return type(value), look(vars(value))


def _is_shared(value: object) -> bool:
    """A configuration is one object for all blocks; to look into it takes long."""
    return hasattr(value, "to_dict")
