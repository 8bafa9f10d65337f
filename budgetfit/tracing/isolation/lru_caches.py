"""Clear ``functools.lru_cache``s of a model's code that were populated by a trace.

Models cache tables of positions and anchors. A trace would leave fake tensors in these
caches, which a real forward would find.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

LruCache: Any = type(functools.lru_cache(maxsize=1)(len))


@contextlib.contextmanager
def lru_caches_cleared(modules: Collection[nn.Module]) -> Iterator[None]:
    """Clear the caches that had misses while the context was open.

    Those of functions and methods in the Python modules of the classes of ``modules``,
    and those that are attributes of them: a copy of a module shares them. Earlier
    entries are computed again when they are needed.
    """
    names = {kind.__module__ for kind in set(map(type, modules))}
    functions = [each for name in sorted(names) for each in cached_functions(name)]
    for module in modules:
        own = vars(module).values()
        functions += [each for each in own if type(each) is LruCache]
    before = [function.cache_info().misses for function in functions]
    try:
        yield
    finally:
        for function, misses in zip(functions, before, strict=True):
            if function.cache_info().misses > misses:
                function.cache_clear()


@functools.cache
def cached_functions(module: str) -> tuple[Any, ...]:
    """Return the ``lru_cache``s of a Python module and its classes."""
    found = []
    for value in list(vars(sys.modules.get(module, object)).values()):
        own = vars(value).values() if isinstance(value, type) else [value]
        for each in own:
            is_method = isinstance(each, (staticmethod, classmethod))
            function = each.__func__ if is_method else each
            found += [one for one in _inside(function) if isinstance(one, LruCache)]
    return tuple(dict.fromkeys(found))


def _inside(function: Any) -> list[Any]:
    """Return a function and its closure, where decorators put a cached function."""
    is_function = isinstance(function, types.FunctionType)
    cells = (function.__closure__ or ()) if is_function else ()
    inner = []
    for cell in cells:
        with contextlib.suppress(ValueError):  # an empty cell
            inner.append(cell.cell_contents)
    return [function, *inner]
