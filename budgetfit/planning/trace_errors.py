"""A trace that fails: said with module path and op, and without torch's own log."""

from __future__ import annotations

import traceback

import torch
from torch import nn

from budgetfit.core.errors import TraceError
from budgetfit.tracing.fake_model import quiet_fakes

__all__ = ["quiet_fakes", "trace_error"]


def trace_error(model: nn.Module, error: Exception) -> TraceError:
    """Return the error that names module path and op, from any that a trace raised."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    module, op = _where(error)
    place = f", in {module!r}" if module else ""
    place += f" at {op}" if op else ""
    return TraceError(
        f"{type(model).__name__} cannot run on fake tensors{place}: "
        f"{type(error).__name__}: {text}. Pass an example batch that the model's "
        "forward accepts (batch=...), and a loss= if it returns none.",
        module=module or type(model).__name__,
        op=op,
    )


def _where(error: Exception) -> tuple[str, str]:
    """Return the path of the innermost module that ran, and the op, from the frames.

    It was a copy of the model that ran, so paths are those below its outermost module.
    """
    modules: list[nn.Module] = []
    op = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        running, func = frame.f_locals.get("self"), frame.f_locals.get("func")
        if isinstance(running, nn.Module):
            modules.append(running)
        if isinstance(func, torch._ops.OpOverload):  # noqa: SLF001 - it has no other name
            op = str(func)
    if not modules:
        return "", op
    names = {id(module): name for name, module in modules[0].named_modules()}
    return names.get(id(modules[-1]), ""), op
