"""Find the repeated blocks of a model: the units of activation checkpointing.

A block takes and returns a hidden state and is one of several of its class.
transformers marks its own with ``GradientCheckpointingLayer``; otherwise blocks are the
children of the outermost ``ModuleList`` or ``Sequential``. A model without repetition
has its direct children as blocks.
"""

import sys
from collections import Counter
from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.ModuleList, nn.Sequential)
MIN_BLOCKS = 2  # one block is no chain


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the module paths of the model's blocks, in registration order."""
    # Only a trace shows the execution order, and whether each runs exactly once.
    marked = _marked_layers(model)
    if len(marked) >= MIN_BLOCKS:
        return marked
    for search in (_repeated_children, _cells):
        found = search(model)
        if len(found) >= MIN_BLOCKS:
            return found
    children = tuple(_direct_children(model))
    return children if len(children) >= MIN_BLOCKS else ()


def _marked_layers(model: nn.Module) -> tuple[str, ...]:
    """Return transformers' own blocks, outermost ones only."""
    layers = sys.modules.get("transformers.modeling_layers")
    if layers is None:  # not imported, so the model has no such block
        return ()
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if (
            name
            and not inside
            and isinstance(module, layers.GradientCheckpointingLayer)
        ):
            names.append(name)
    return tuple(names)


def _repeated_children(model: nn.Module) -> tuple[str, ...]:
    """Return children of containers with several children of one class."""
    names: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, CONTAINERS) or _inside(path, names):
            continue
        children = [(n, c) for n, c in module.named_children() if _has_parameters(c)]
        classes = Counter(type(child) for _, child in children)
        # Consecutive Linear layers are the inside of one block, not a chain of blocks.
        repeated = {
            cls
            for cls, count in classes.items()
            if count >= MIN_BLOCKS and any(True for c in children if _composite(c[1]))
        }
        names += [
            f"{path}.{name}" if path else name
            for name, child in children
            if type(child) in repeated and _composite(child)
        ]
    return tuple(names)


def _cells(model: nn.Module) -> tuple[str, ...]:
    """Return the children of the outermost ``nn.Sequential`` with at least two."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential) and len(module) >= MIN_BLOCKS:
            return tuple(
                f"{path}.{name}" if path else name
                for name, _ in module.named_children()
            )
    return ()


def _direct_children(model: nn.Module) -> Iterator[str]:
    """Yield children with parameters; for a ModuleList or ModuleDict, its own."""
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from (f"{name}.{path}" for path in _direct_children(child))
        elif _has_parameters(child):
            yield name


def _inside(path: str, names: list[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
