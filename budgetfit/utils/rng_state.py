"""Save and restore RNG states that torch's checkpointing does not preserve."""

import ctypes
import random
import sys
from typing import Any, NamedTuple, Self

import numpy as np

# numpy/random/src/mt19937/mt19937.h: 624 words of 4 bytes and the place among them.
_MT19937_BYTES = 624 * 4 + 4
_CACHED_GAUSS = 3  # index in the state tuple: has_gauss


class HostRngState(NamedTuple):
    """State of Python's and numpy's global random generators.

    Captured around every forward of a recomputed block: 8 microseconds for Python's,
    negligible for numpy's while it is not used.
    """

    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> Self:
        """Capture the current state."""
        return cls(random.getstate(), _numpy_state.get())

    def restore(self) -> None:
        """Restore the captured state."""
        random.setstate(self.python)
        if _numpy_state.get() is not self.numpy:
            np.random.set_state(self.numpy)  # noqa: NPY002 - the global one


class _NumpyState:
    """Cache of numpy's state, read (30 microseconds) only after it has advanced."""

    def __init__(self) -> None:
        self._newest: tuple[bytes, Any] | None = None

    def get(self) -> object:
        """Return the state; the same object while it is unchanged."""
        # The functions of ``np.random`` are methods of one generator. While a trace
        # draws from a copy they are not, and the user may have replaced the bits.
        generator = getattr(np.random.get_state, "__self__", None)
        bits = getattr(generator, "_bit_generator", None)
        if not isinstance(bits, np.random.MT19937):
            return np.random.get_state()  # noqa: NPY002
        words = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
        newest = self._newest
        # A cached normal sample can be drawn without advancing the state words.
        if newest is None or newest[0] != words or newest[1][_CACHED_GAUSS]:
            newest = self._newest = words, np.random.get_state()  # noqa: NPY002
        return newest[1]


_numpy_state = _NumpyState()


def is_generator_kind(kind: type) -> bool:
    """Whether objects of a class are random generators of Python, numpy or torch."""
    torch = sys.modules.get("torch")
    kinds = (random.Random, np.random.RandomState, np.random.Generator)
    if issubclass(kind, random.SystemRandom):
        return False  # system entropy has no state
    return issubclass(kind, kinds) or (
        torch is not None and issubclass(kind, torch.Generator)
    )


def generator_state(generator: Any) -> object:  # noqa: ANN401
    """Return a generator's state, for ``set_generator_state``."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:  # noqa: ANN401
    """Restore a generator to ``state``."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
