"""Kernels at PyTorch's dispatcher that only the thread that traces meets.

A registration is the whole process's. So each kernel asks in which thread it runs, and
hands every other one on to the kernel that was there before.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch._compile import _disable_dynamo
from torch._ops import OpOverload

from budgetfit.tracing.call_cache import Args, Kwargs


class _Tracing(threading.local):
    """The kernels of the trace that runs in this thread, by dispatch key and op."""

    def __init__(self) -> None:
        self.kernels: dict[str, Mapping[str, Callable[..., Any] | None]] = {}


_TRACING: Final = _Tracing()
_LOCK: Final = threading.Lock()
_LIBRARIES: dict[str, tuple[torch.library.Library, set[str]]] = {}
_users = 0


@contextlib.contextmanager
def kernels_in_this_thread(
    dispatch_key: str, kernels: Mapping[str, Callable[..., object] | None]
) -> Iterator[None]:
    """Run ``kernels`` for aten ops under a dispatch key, in this thread.

    They are registered when they are first needed and stay registered while any other
    thread is alive: to take one back while another thread calls the op ends that call
    with an internal assert of PyTorch. In a process of one thread nothing stays.

    Args:
        dispatch_key: Such as ``AutocastCPU``.
        kernels: By ``name.overload``, called with the op's arguments; one that returns
            NotImplemented leaves a call to torch. None does what torch's fallthrough
            kernel does.
    """
    global _users  # noqa: PLW0603 - how many traces use what is registered
    before = _TRACING.kernels
    with _LOCK:
        _register(dispatch_key, kernels)
        _users += 1
    _TRACING.kernels = {**before, dispatch_key: kernels}
    try:
        yield
    finally:
        _TRACING.kernels = before
        with _LOCK:
            _users -= 1
        unregister_unused()


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """Return whether an op consists of others, for gradients too."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return op.has_kernel_for_dispatch_key(key)


def run_composite(op: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run the ops that an op consists of."""
    # Under ``inference_mode`` autograd's dispatch keys are off: dispatch modes meet
    # such ops whole, where otherwise the kernels of ``AutogradCPU`` had taken them
    # apart.
    name = op.name().removeprefix("aten::")
    kernel = _TRACING.kernels.get("AutogradCPU", {}).get(name)
    found = NotImplemented if kernel is None else kernel(*args, **kwargs)
    if found is not NotImplemented:
        return found
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return op._op_dk(key, *args, **kwargs)


def unregister_unused() -> None:
    """Put back torch's own kernels, unless a trace or another thread may run ours."""
    with _LOCK:
        if not _users and threading.active_count() == 1:
            for library, _ in _LIBRARIES.values():
                library._destroy()
            _LIBRARIES.clear()


def _skipping(dispatch_key: str, name: str) -> Callable[..., object]:
    """Return a kernel that does what torch's fallthrough kernel does."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    key = getattr(torch._C.DispatchKey, dispatch_key)
    after = torch._C._dispatch_keyset_full_after(key)

    @_disable_dynamo
    def kernel(keyset: Any, *args: object, **kwargs: object) -> object:
        return op.redispatch(keyset & after, *args, **kwargs)

    return kernel


def _register(dispatch_key: str, names: Mapping[str, object]) -> None:
    if dispatch_key not in _LIBRARIES:
        library = torch.library.Library("aten", "IMPL", dispatch_key)
        _LIBRARIES[dispatch_key] = library, set()
    library, known = _LIBRARIES[dispatch_key]
    with warnings.catch_warnings():
        # An override of a C++ kernel is announced once per process; it is meant here.
        warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
        for name in sorted(names.keys() - known):
            library.impl(
                name,
                _for_threads(dispatch_key, name),
                with_keyset=True,
                allow_override=True,
            )
            known.add(name)


@functools.cache
def _for_threads(dispatch_key: str, name: str) -> Callable[..., object]:
    """Return what is registered; made once, before it hides what torch runs."""
    skip = _skipping(dispatch_key, name)
    earlier = _earlier(dispatch_key, name) or skip

    @_disable_dynamo  # an eager op of a compiled step may meet this
    def kernel(keyset: object, *args: object, **kwargs: object) -> object:
        kernels = _TRACING.kernels.get(dispatch_key, {})
        if name not in kernels:
            return earlier(keyset, *args, **kwargs)
        own = kernels[name]
        if own is None:
            return skip(keyset, *args, **kwargs)
        result = own(*args, **kwargs)
        return earlier(keyset, *args, **kwargs) if result is NotImplemented else result

    return kernel


def _earlier(dispatch_key: str, name: str) -> Callable[..., object] | None:
    """Return what torch runs for an op under a key; None where it skips the key."""
    has_own = torch._C._dispatch_has_kernel_for_dispatch_key(
        f"aten::{name}", dispatch_key
    )
    if dispatch_key.startswith("Autocast") and not has_own:
        return None
    return torch.library.get_kernel(f"aten::{name}", dispatch_key).call_boxed
