"""Modules that a traced program imports for the first time, loaded as if nothing ran.

Libraries import their parts when they are first used, and many make tables of constants
while they are imported. Within a trace those would be fakes, which stay in the library
and break it after the trace, and they would count as memory of the first trace alone.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _RealImports:
    """Finds modules as Python does, and runs them with none of torch's modes."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            _load_without_modes(spec.loader)
        return spec


def _load_without_modes(loader: Any) -> None:  # noqa: ANN401 - a loader of any kind
    """Let a loader, made for one module, run it outside of what is traced."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # what is kept in the module is as Python made it
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            execute(module)

    loader.exec_module = exec_module


@contextlib.contextmanager
def real_imports() -> Iterator[None]:
    """Keep modules that are imported while the context is open out of its modes."""
    with _disable_current_modes():  # has imports of its own, which must not ask for it
        finder: Any = _RealImports()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
