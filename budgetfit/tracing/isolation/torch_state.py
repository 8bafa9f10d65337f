"""Neutralise ambient torch state during planning: autocast, modes, hooks, dtype.

A user may plan under autocast, ``inference_mode``, a default device or dtype, or a
profiler's mode. Each would become part of the trace. All of them are disabled and
restored at the end.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import torch
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

# Default dtype, library patches and RNG state are process-wide.
_ONE_AT_A_TIME = threading.RLock()
_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)
_AUTOCAST_DEVICES = ("cpu", "cuda")
_DETERMINISTIC: Final = (
    "torch.use_deterministic_algorithms is on, and memory is predicted with it off: "
    "scatters, gathers, indexing, interpolation, pooling and cumulative sums then run "
    "other kernels on CUDA, most of them in backward, which may take several times the "
    "memory of their tensors. Leave room for them, or switch it off"
)
_ANOMALY: Final = (
    "torch.autograd.detect_anomaly is on, and memory is predicted with it off: its "
    "check for nan makes a bool for each number of a gradient, a quarter of the "
    "largest one in fp32 and half in 16 bits. Leave room for it, or switch it off"
)
_unpredicted: list[str] = []  # notes on settings of the user's that are off meanwhile


@contextlib.contextmanager
def neutral_torch_state() -> Iterator[None]:
    """Disable the user's torch modes and settings; one thread at a time.

    Context manager and decorator.
    """
    with (
        _ONE_AT_A_TIME,
        _disable_current_modes(),
        _no_function_modes(),
        _no_global_hooks(),
        _no_saved_tensors_hooks(),
        _no_autocast(),
        _no_checks(),
        _default_dtype(),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
    ):
        yield


def unpredicted_settings() -> tuple[str, ...]:
    """Return notes on the user's settings that take memory and are not predicted."""
    return tuple(_unpredicted)


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """Pop function modes; the default device is one that torch also stores by name."""
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()]
    default = torch._GLOBAL_DEVICE_CONTEXT
    chosen = getattr(default, "device_context", None)
    default.device_context = None
    try:
        yield
    finally:
        default.device_context = chosen
        for mode in reversed(modes):
            _push_mode(mode)


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Remove global module hooks, which add to the graph: a FLOP counter's, say."""
    tables = [getattr(module_hooks, name) for name in _GLOBAL_HOOKS]
    kept = [dict(table) for table in tables]
    for table, hooks in zip(tables, kept, strict=True):
        if hooks:
            table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            if hooks:
                table.update(hooks)


@contextlib.contextmanager
def _no_saved_tensors_hooks() -> Iterator[None]:
    stack = torch._C._autograd
    hooks = []
    while (top := stack._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        stack._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            stack._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Leave all autocast regions: the cast cache is then freed with the inner one."""
    # It is freed when the outermost region ends: with the user's, after the step.
    enabled = [name for name in _AUTOCAST_DEVICES if torch.is_autocast_enabled(name)]
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    for name in enabled:
        torch.set_autocast_enabled(name, False)
    try:
        yield
    finally:
        for name in enabled:
            torch.set_autocast_enabled(name, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextlib.contextmanager
def _no_checks() -> Iterator[None]:
    """Disable deterministic algorithms and anomaly detection, which cost memory."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly = torch.is_anomaly_enabled()
    check_nan = torch.is_anomaly_check_nan_enabled()
    if deterministic:
        torch.use_deterministic_algorithms(mode=False)
        _unpredicted.append(_DETERMINISTIC)
    if anomaly:
        torch.set_anomaly_enabled(False)
    if anomaly and check_nan:
        _unpredicted.append(_ANOMALY)
    try:
        yield
    finally:
        if deterministic:
            torch.use_deterministic_algorithms(mode=True, warn_only=warn_only)
            _unpredicted.remove(_DETERMINISTIC)
        if anomaly:
            torch.set_anomaly_enabled(True, check_nan)
        if anomaly and check_nan:
            _unpredicted.remove(_ANOMALY)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    if dtype is torch.float32:  # not set needlessly: other threads see it
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
