"""Functions of a model's code that remember their results: no fake stays in them.

Models keep tables of positions and anchors with ``functools.lru_cache``. What a trace
puts there is fake, and a real forward would find it afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_Remembering = type(functools.lru_cache(maxsize=1)(len))


@contextlib.contextmanager
def no_fakes_remembered(model: nn.Module) -> Iterator[None]:
    """Empty the memories that were added to while the context was open.

    They are those of functions and methods in the files that the model's classes are
    from, and those that its modules hold: a copy of a module shares them. What was
    remembered before is worked out again when it is asked for.
    """
    names = {type(module).__module__ for module in model.modules()}
    functions = [each for name in sorted(names) for each in _remembering(name)]
    for module in model.modules():
        own = vars(module).values()
        functions += [each for each in own if isinstance(each, _Remembering)]
    before = [function.cache_info().misses for function in functions]
    try:
        yield
    finally:
        for function, misses in zip(functions, before, strict=True):
            if function.cache_info().misses > misses:
                function.cache_clear()


@functools.cache
def _remembering(module: str) -> tuple[Any, ...]:
    """Return the functions of a Python module and its classes that remember."""
    found = []
    for value in list(vars(sys.modules.get(module, object)).values()):
        own = vars(value).values() if isinstance(value, type) else [value]
        for each in own:
            is_method = isinstance(each, (staticmethod, classmethod))
            function = each.__func__ if is_method else each
            found += [one for one in _inside(function) if isinstance(one, _Remembering)]
    return tuple(dict.fromkeys(found))


def _inside(function: Any) -> list[Any]:  # noqa: ANN401 - whatever a class holds
    """Return a function and what it closes over: decorators put a memory there."""
    is_function = isinstance(function, types.FunctionType)
    cells = (function.__closure__ or ()) if is_function else ()
    inner = []
    for cell in cells:
        with contextlib.suppress(ValueError):  # a cell that is empty yet
            inner.append(cell.cell_contents)
    return [function, *inner]
