"""Keep garbage collection, imports and random numbers of the program out of a trace."""

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.tracing.isolation.private_generators import private_generators
from budgetfit.tracing.isolation.scalar_randomness import pinned_scalar_draws


@contextlib.contextmanager
def python_state_preserved() -> Iterator[None]:
    """Disable garbage collection, and import and draw apart from the program."""
    # Scalar random draws are pinned (``scalar_randomness``).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with (
            private_generators(),
            torch.enable_grad(),
            imports_outside_modes(),
            pinned_scalar_draws(),
        ):
            yield
    finally:
        if was_enabled:
            gc.enable()


class _FinderOutsideModes:
    """Meta path finder that executes modules with torch's modes disabled."""

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


def _load_without_modes(loader: Any) -> None:
    """Patch a module's loader to execute it with torch's modes disabled."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the module keeps its loader: undo the patch
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            execute(module)

    loader.exec_module = exec_module


@contextlib.contextmanager
def imports_outside_modes() -> Iterator[None]:
    """Import modules outside of the active modes while the context is open."""
    # Libraries import submodules lazily, and many build constant tensors at import. In
    # a trace those would be fake tensors, which stay in the library and break it
    # afterwards, and they would count as memory of the first trace only.
    with _disable_current_modes():  # its own imports must not use the hook
        finder: Any = _FinderOutsideModes()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
