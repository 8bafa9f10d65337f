"""What torch.compile has compiled of a model, and how to run it eagerly for a while.

A compiled block decides for itself what it saves for backward and what it computes
again: under it a plan's segments would mean something else (user-needs U21).
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from budgetfit.applying.undo import Undo
    from budgetfit.core.recipe import Recipe

_WHY = (
    "does that its own way. A plan that keeps everything "
    '(checkpointing="none") leaves it on.'
)
_IN_PLACE = "_compiled_call_impl"  # what ``module.compile()`` sets
_PLAIN_FUNCTION = "_torchdynamo_orig_callable"  # of what ``torch.compile`` returns


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile(module)`` was called with, or ``model``.

    The two share all parameters and submodules; only the names differ, by a prefix.
    """
    module: Any = model
    while _is_wrapper(module):
        module = module._orig_mod  # noqa: SLF001 - it has no other name
    return module


def without_wrapper(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Return what ``torch.compile(model)`` wraps, if a plan changes something in it.

    A plan names blocks without the wrapper's prefix. The wrapper itself is not changed.
    """
    plain = plain_module(model)
    if plain is model or not (recipe.segments or recipe.loss_chunks > 1):
        return model
    warnings.warn(
        "run.model is the model without torch.compile: compiled code chooses for "
        f"itself what it saves and recomputes, and the plan {_WHY}",
        stacklevel=3,
    )
    return plain


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of the compiled modules in ``model``, ``""`` for itself."""
    return [
        name
        for name, module in model.named_modules()
        if _is_wrapper(module)
        or module.__dict__.get(_IN_PLACE) is not None
        or _plain_forward(module) is not None
    ]


def switch_off_compile(model: nn.Module, undo: Undo, *, say: bool) -> None:
    """Run every compiled module in ``model`` eagerly until undone.

    Seen are ``module.compile()``, ``torch.compile(module)`` as a submodule and
    ``module.forward = torch.compile(module.forward)``; not functions that a forward
    calls, which save what they save in any plan.

    Args:
        model: Modified in place, on instances alone.
        undo: Takes what switches it on again.
        say: Whether to warn if there was anything.
    """
    names = compiled_modules(model)
    if not names:
        return
    if say:
        warnings.warn(
            f"torch.compile is switched off for {_listed(names)} until run.undo(): "
            "compiled code chooses for itself what it saves and recomputes, and the "
            f"plan {_WHY}",
            stacklevel=4,
        )
    modules = dict(model.named_modules())
    for module in (modules[name] for name in names):
        undo.hide_on(module, _IN_PLACE)
        forward = _plain_forward(module)
        if _is_wrapper(module):
            undo.set_on(module, "forward", plain_module(module).__call__)
        elif forward is not None:
            undo.set_on(module, "forward", forward)


def say_unverified(model: nn.Module) -> None:
    """Warn that a compiled model's bytes are not those of the plan."""
    names = compiled_modules(model)
    if names:
        warnings.warn(
            f"{_listed(names, first=True)} compiled, and the plan's bytes and times "
            "are those of eager mode: compiled code may take less or more. Only "
            "verify() on the card can tell.",
            stacklevel=4,
        )


def say_compiled_since(model: nn.Module, before: int) -> None:
    """Warn if more of a model is compiled than the ``before`` modules at ``apply``."""
    names = compiled_modules(model)
    if len(names) > before:
        warnings.warn(
            f"{_listed(names, first=True)} compiled after apply: blocks that the plan "
            "recomputes or offloads run eagerly, and bytes and times of the rest are "
            "not those of the plan. Only verify() on the card can tell.",
            stacklevel=4,
        )


def _is_wrapper(module: nn.Module) -> bool:
    """Whether this is what ``torch.compile(module)`` returned."""
    # Importing dynamo takes seconds; nobody has a wrapper who has not imported it.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _plain_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return what an instance's compiled ``forward`` was made from; None if none is."""
    forward = module.__dict__.get("forward")
    return getattr(forward, _PLAIN_FUNCTION, None)


def _listed(names: list[str], *, first: bool = False) -> str:
    """Say which modules: ``the model``, a name, or a name and how many more.

    ``first`` ends with the verb, as at the beginning of a sentence.
    """
    if names == [""]:
        return "The model is" if first else "the model"
    shown = "the model" if names[0] == "" else repr(names[0])
    if len(names) > 1:
        shown += f" and {len(names) - 1} more"
    if not first:
        return shown
    return shown[0].upper() + shown[1:] + (" is" if len(names) == 1 else " are")
