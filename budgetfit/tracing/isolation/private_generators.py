"""Python's and numpy's global random generators: a trace draws from copies of them.

``random.random`` and its like are methods of one generator that all threads share. In
the thread that traces they are those of a copy, so that a trace neither takes numbers
that other threads would draw nor has to put a state back that others have moved on.
"""

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final
from unittest import mock

import numpy as np
import torch

_DRAWS: Final[tuple[Any, Any]] = (random.random, np.random.random_sample)
_PYTHON, _NUMPY = (draw.__self__ for draw in _DRAWS)
# The names are the process's: a trace waits for another thread's to put them back.
_ONE_AT_A_TIME: Final = threading.RLock()


@contextlib.contextmanager
def private_generators() -> Iterator[None]:
    """Draw from copies of the global generators in this thread."""
    # What a model draws by names that it has imported from ``random``, and torch's own
    # generator, cannot be told from other threads' draws. There the state is put back,
    # but only if no other thread is alive: it would draw the same numbers again.
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global
    torch_state = torch.get_rng_state()
    alone = threading.active_count() == 1
    try:
        with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
            for module, shared, copy in _copies(python, numpy):
                stack.enter_context(_redirected(module, shared, copy))
            yield
    finally:
        if alone and threading.active_count() == 1:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002 - models draw from it
            torch.set_rng_state(torch_state)


def _copies(python: Any, numpy: Any) -> Iterator[tuple[ModuleType, object, object]]:
    own = random.Random()  # noqa: S311 - no secret
    own.setstate(python)
    yield random, _PYTHON, own
    own_numpy = np.random.RandomState()
    own_numpy.set_state(numpy)
    yield np.random, _NUMPY, own_numpy


@contextlib.contextmanager
def _redirected(module: ModuleType, shared: object, copy: object) -> Iterator[None]:
    """Have a module's functions, methods of ``shared``, be those of ``copy`` here."""
    thread: int | None = threading.get_ident()

    def choose(
        method: Callable[..., object],
        own: Callable[..., object],
        *args: object,
        **kwargs: object,
    ) -> object:
        drawn = own if threading.get_ident() == thread else method
        return drawn(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name, method in list(vars(module).items()):
            if getattr(method, "__self__", None) is shared:
                own = functools.partial(choose, method, getattr(copy, method.__name__))
                stack.enter_context(mock.patch.object(module, name, own))
        try:
            yield
        finally:
            thread = None  # what was imported meanwhile draws from the shared one again
