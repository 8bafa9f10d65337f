"""Structural signature of a block: blocks with equal ones have equal traces.

It covers the classes and paths of all modules in a block, shapes, strides, dtypes and
``requires_grad`` of its tensors, training flags, hooks, and every attribute. Objects
that are not understood are compared by identity. An integer that grows by one from
block to block is an index and is ignored (``layer_idx``).
"""

import enum
import functools
import types
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from budgetfit.tracing.blocks.find_blocks import CONTAINERS

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_COMPARED_SEPARATELY = ("_modules", "_parameters", "_buffers")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Lists of the numbers of some blocks: ``fullatt_block_indexes``, ``out_indices``.
_LISTS_OF_NUMBERS = ("indexes", "indices", "layers")
_MAX_DEPTH = 5  # of nested objects; deeper ones are compared by identity


class BlockPosition(NamedTuple):
    """A block's position: the path of its container, and its index in that."""

    container: str
    position: int


class PlacedBlock(NamedTuple):
    """A block in a container: its position and its signature."""

    place: BlockPosition
    signature: Hashable


def block_signatures(model: nn.Module, blocks: Sequence[str]) -> dict[str, PlacedBlock]:
    """Return the signatures of blocks that are in a container and share no tensors."""
    # Two blocks of one container with equal signatures differ in nothing observable.
    modules = dict(model.named_modules())
    lists = [(path, values) for path, _, values in config_lists(model, blocks)]
    rows: dict[str, dict[str, Any]] = {}
    places: dict[str, BlockPosition] = {}
    for name in _blocks_without_shared_tensors(model, modules, blocks):
        container, _, key = name.rpartition(".")
        parent = modules[container]
        if not isinstance(parent, CONTAINERS):
            continue
        place = places[name] = BlockPosition(
            container, list(parent._modules).index(key)
        )
        rows[name] = dict(_attributes(modules[name]))
        for path, values in lists:  # what a loop reads for each block
            if len(values) == len(parent):
                rows[name][f"[{path}]"] = values[place.position]
            elif numbers_blocks(path, values, container, len(parent)):
                rows[name][f"[{path}]"] = place.position in values
    indices = _index_attributes(rows, places)
    numbers: dict[Hashable, int] = {}
    result = {}
    for name, row in rows.items():
        signature = tuple(
            (key, "place", places[name].position - value)
            if (places[name].container, key) in indices
            else (key, value)
            for key, value in row.items()
        )
        number = numbers.setdefault(signature, len(numbers))
        result[name] = PlacedBlock(places[name], number)
    return result


def config_lists(
    model: nn.Module, blocks: Sequence[str]
) -> Iterator[tuple[str, tuple[object, str], list[Any] | tuple[object, ...]]]:
    """Yield path, (holder, attribute) and values of lists of plain values."""
    # They are attributes of modules outside ``blocks`` and of their configurations
    # (``config.layer_types``), and may have an entry for each block.
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


def numbers_blocks(
    where: str, values: Sequence[object], container: str, count: int
) -> bool:
    """Whether a list has the numbers of some blocks, in ascending order.

    ``where``: as ``config_lists`` yields it; ``container``: path of the blocks'
    container, which the list's holder has.
    """
    holder = container.rpartition(".")[0]
    if not (where.startswith(f"{holder}: ") and where.endswith(_LISTS_OF_NUMBERS)):
        return False
    numbers = [value for value in values if type(value) is int and 0 <= value < count]
    return len(numbers) == len(values) and numbers == sorted(set(numbers))


def _settings_of(module: nn.Module) -> Iterator[object]:
    """Yield the module and its configurations."""
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


def _index_attributes(
    rows: dict[str, dict[str, Any]], places: dict[str, BlockPosition]
) -> set[tuple[str, str]]:
    """Return the attributes, by container, that only hold a block's index."""
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


def _attributes(block: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """Yield everything comparable of a block, by path and name."""
    inside = {id(module): path for path, module in block.named_modules()}
    for path, module in block.named_modules():
        yield f"{path}:", (type(module), tuple(module._modules.keys()))
        tensors = (*module._parameters.items(), *module._buffers.items())
        for name, tensor in tensors:
            yield f"{path}:{name}", None if tensor is None else _tensor(tensor)
            for kind in _TENSOR_HOOKS:
                if hooks := getattr(tensor, kind, None):
                    hooked = _comparable(list(hooks.values()), inside, ())
                    yield f"{path}:{name}:{kind}", hooked
        for name, value in vars(module).items():
            if name in _COMPARED_SEPARATELY:
                continue
            if isinstance(value, dict) and name.endswith(("hooks", "kwargs")):
                if not value:  # as most are: half of all attributes
                    continue
                value = list(value.values())  # noqa: PLW2901 - keys are process-wide counters
            yield f"{path}.{name}", _comparable(value, inside, ())


def _tensor(tensor: torch.Tensor) -> Hashable:
    return (
        type(tensor),
        tuple(tensor.shape),
        tensor.layout,
        tensor.stride() if tensor.layout is torch.strided else (),
        tensor.dtype,
        tensor.requires_grad,
    )


def _comparable(  # noqa: PLR0911 - one kind of value each
    value: object, inside: dict[int, str], above: tuple[int, ...]
) -> Hashable:
    """Return a hashable to compare a value by; ``above``: ids of its holders."""
    if type(value) is int:
        return value
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, nn.Module):
        return "module", inside.get(id(value), id(value))
    if id(value) in above or len(above) > _MAX_DEPTH:
        return "object", id(value)
    look = functools.partial(_comparable, inside=inside, above=(*above, id(value)))
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
    is_config = hasattr(value, "to_dict")  # shared by all blocks, slow to compare
    if isinstance(value, type) or not hasattr(value, "__dict__") or is_config:
        return "object", id(value)
    return type(value), look(vars(value))
