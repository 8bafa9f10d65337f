"""Modules that only a loss reaches: a frozen teacher, a perceptual network.

They are on the card like the model, so a trace runs fake copies of them and counts
their weights. Found are those in a loss's closure, defaults, globals, arguments bound
to it, attributes, and in the functions of the user's own that it calls.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from budgetfit.planning.code_fingerprint import is_library
from budgetfit.tracing.fake_model import fake_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    Swap = Callable[[nn.Module], nn.Module]

_DEEPEST: Final = 8  # objects in objects, functions that call functions


class FakedLoss:
    """A loss, and the same one on fake copies of the modules that it runs.

    Attributes:
        loss: What the traced program calls; the user's own until ``fake``.
    """

    def __init__(self, loss: Callable[..., Any] | None, model: nn.Module) -> None:
        self.loss = loss
        self._real = loss
        self._model = model

    def fake(self, mode: FakeTensorMode, twin: nn.Module) -> Sequence[nn.Module]:
        """Make the fake copies and return them: they are weights beside the model's.

        What belongs to the model becomes the twin's part of that name, so that a loss
        that looks at the model's weights looks at those that are traced.
        """
        if self._real is None:
            return ()
        names = {module: name for name, module in self._model.named_modules()}
        parts = dict(twin.named_modules())
        made: dict[nn.Module, nn.Module] = {}

        def swap(module: nn.Module) -> nn.Module:
            if module in names:
                return parts.get(names[module], module)
            if module not in made:
                if any(part in names for part in module.modules()):
                    return _around(module, swap)
                made[module] = fake_copy(module, mode)
            return made[module]

        self.loss = swapped(self._real, swap)
        return tuple(made.values())


def modules_beside(
    loss: Callable[..., Any] | None, model: nn.Module
) -> tuple[nn.Module, ...]:
    """Return the modules that a loss runs and that are no part of the model."""
    own = set(model.modules())
    return tuple(
        module for module in modules_of(loss) if own.isdisjoint(module.modules())
    )


@contextlib.contextmanager
def loss_modules_on(
    device: torch.device, loss: Callable[..., Any] | None, model: nn.Module
) -> Iterator[tuple[nn.Module, ...]]:
    """Have what a loss runs beside the model on a device, and back where it was."""
    modules = modules_beside(loss, model)
    homes = [
        next((tensor.device for tensor in module.state_dict().values()), device)
        for module in modules
    ]
    for module in modules:
        module.to(device)
    try:
        yield modules
    finally:
        for module, home in zip(modules, homes, strict=True):
            module.to(home)


def loss_notes(loss: Callable[..., Any] | None, model: nn.Module) -> tuple[str, ...]:
    """Say which modules beside the model a loss runs."""
    return tuple(
        f"the loss runs a {type(module).__name__} of "
        f"{sum(p.numel() for p in module.parameters()):,} parameters: counted, as it "
        "must be on the card, too"
        for module in modules_beside(loss, model)
    )


def modules_of(loss: Callable[..., Any] | None) -> tuple[nn.Module, ...]:
    """Return the modules with tensors that a loss reaches."""
    found: dict[nn.Module, None] = {}

    def note(module: nn.Module) -> nn.Module:
        found[module] = None
        return module

    swapped(loss, note)
    return tuple(found)


def swapped(value: Any, swap: Swap) -> Any:  # noqa: ANN401 - whatever a loss is
    """Return a value with the modules in it swapped; itself where there are none."""
    return _Swapping(swap).of(value, 0)


class _Swapping:
    def __init__(self, swap: Swap) -> None:
        self._swap = swap
        self._open: set[int] = set()

    def of(self, value: Any, depth: int) -> Any:  # noqa: ANN401
        if isinstance(value, nn.Module):
            return self._swap(value) if _has_tensors(value) else value
        if depth > _DEEPEST or id(value) in self._open:
            return value
        self._open.add(id(value))
        try:
            return self._inside(value, depth + 1)
        finally:
            self._open.discard(id(value))

    def _inside(self, value: Any, depth: int) -> Any:  # noqa: ANN401
        if type(value) in (list, tuple):
            items = [self.of(item, depth) for item in value]
            return type(value)(items) if _differ(items, value) else value
        looks: dict[type, Callable[[Any, int], Any]] = {
            dict: self._mapping,
            functools.partial: self._partial,
            types.MethodType: self._method,
            types.FunctionType: self._function,
        }
        return looks.get(type(value), self._object)(value, depth)

    def _partial(self, value: functools.partial[Any], depth: int) -> Any:  # noqa: ANN401
        parts = (value.func, value.args, value.keywords)
        func, args, keywords = new = [self.of(part, depth) for part in parts]
        if not _differ(new, parts):
            return value
        return functools.partial(func, *args, **keywords)

    def _method(self, value: types.MethodType, depth: int) -> Any:  # noqa: ANN401
        owner = self.of(value.__self__, depth)
        changed = owner is not value.__self__
        return types.MethodType(value.__func__, owner) if changed else value

    def _mapping(self, value: dict[Any, Any], depth: int) -> dict[Any, Any]:
        new = {key: self.of(item, depth) for key, item in value.items()}
        return new if _differ(new.values(), value.values()) else value

    def _function(self, function: types.FunctionType, depth: int) -> Any:  # noqa: ANN401
        if is_library(function.__module__ or ""):
            return function
        cells = function.__closure__ or ()
        closure = tuple(self._cell(cell, depth) for cell in cells)
        named = {
            name: function.__globals__[name]
            for name in _names(function.__code__)
            if name in function.__globals__
        }
        parts = (named, function.__defaults__, function.__kwdefaults__)
        new_named, defaults, kwdefaults = new = [self.of(part, depth) for part in parts]
        if not _differ(new, parts) and not _differ(closure, cells):
            return function
        rebuilt = types.FunctionType(
            function.__code__,
            {**function.__globals__, **new_named},
            function.__name__,
            defaults,
            closure or None,
        )
        rebuilt.__kwdefaults__ = kwdefaults
        return rebuilt

    def _cell(self, cell: types.CellType, depth: int) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # not bound yet
            return cell
        new = self.of(content, depth)
        return cell if new is content else types.CellType(new)

    def _object(self, value: Any, depth: int) -> Any:  # noqa: ANN401
        """Swap what an object of a class of the user's own holds."""
        attributes = getattr(value, "__dict__", None)
        if attributes is None or isinstance(value, (type, types.ModuleType)):
            return value
        if is_library(type(value).__module__):
            return value
        new = self._mapping(dict(attributes), depth)
        if not _differ(new.values(), attributes.values()):
            return value
        copied = copy.copy(value)
        vars(copied).update(new)
        return copied


def _around(module: nn.Module, swap: Swap) -> nn.Module:
    """Copy a module that contains the model, with its children swapped."""
    copied = copy.copy(module)
    copied._modules = {  # noqa: SLF001 - as Module.__setstate__ does
        name: child if child is None else swap(child)
        for name, child in module._modules.items()  # noqa: SLF001
    }
    return copied


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _differ(new: Any, old: Any) -> bool:  # noqa: ANN401 - two rows of objects
    return any(one is not other for one, other in zip(new, old, strict=True))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
