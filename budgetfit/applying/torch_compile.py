"""torch.compile: compile a plan's blocks; find compiled modules and run them eagerly.

The partitioner of compiled code chooses what is saved for backward and what is
recomputed: inside a checkpointed block that is part of the plan, around several blocks
it takes the place of the plan's segments.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses import FakeTensor

from budgetfit.applying.undo import Undo
from budgetfit.core.recipe import Recipe, selective_blocks

_WHY = (
    "does that its own way. A plan that keeps everything "
    '(checkpointing="none") leaves it on.'
)
_COMPILED_CALL = "_compiled_call_impl"  # set by ``module.compile()``
_ORIGINAL_FUNCTION = "_torchdynamo_orig_callable"  # set by dynamo


# Inductor times padded against unpadded products and takes the faster: which one, and
# so the memory, only the GPU can tell.
COMPILE_OPTIONS: Final = {"shape_padding": False}


def compiled_forward(block: nn.Module) -> Callable[..., object]:
    """Return the block's forward under ``torch.compile``, as plans predict it."""
    # ``dynamic=False``: blocks that share their code and get tensors of other sizes (an
    # encoder's and a decoder's) are compiled for each, not once for all sizes.
    return torch.compile(block.forward, dynamic=False, options=dict(COMPILE_OPTIONS))


def compile_blocks(
    model: nn.Module,
    recipe: Recipe,
    blocks: Iterable[str],
    undo: Undo,
    compile_forward: Callable[[nn.Module], Callable[..., object]] = compiled_forward,
) -> None:
    """Compile the forward of each block, if the recipe says so, before segments apply.

    Selective checkpointing saves outputs of ops, and compiled code has none of these:
    such blocks run eagerly.

    Instance attributes of the model change, and dynamo's settings, which a trace of a
    model on fake tensors sets where it compiles; ``undo`` receives the inverse changes.
    """
    if recipe.compile != "blocks":
        return
    names = compiled_blocks(recipe, blocks)
    if not any(isinstance(each, FakeTensor) for each in model.parameters()):
        if recipe.engine == "ddp":
            _keep_graphs_whole(undo)
        # Blocks of one class share their code, of which dynamo compiles eight versions,
        # 256 in a process, and runs all further ones eagerly. Several models may be
        # applied and undone in any order, so the limits change by a difference.
        _raise_recompile_limits(2 * len(names))
        undo.add(_raise_recompile_limits, -2 * len(names))
    for name in names:
        block = model.get_submodule(name)
        undo.set_attribute(block, "forward", compile_forward(block))


def _keep_graphs_whole(undo: Undo) -> None:
    """Keep dynamo from cutting a block's graph at DDP's buckets."""
    # That overlaps their reduction with the backward of a model in one graph. Of
    # compiled blocks each has its own, and after it the buckets that it has filled are
    # reduced.
    from torch._dynamo import config  # noqa: PLC0415 - takes seconds

    undo.add(setattr, config, "optimize_ddp", config.optimize_ddp)
    config.optimize_ddp = False


def _raise_recompile_limits(versions: int) -> None:
    from torch._dynamo import config  # noqa: PLC0415 - takes seconds

    config.recompile_limit += versions
    config.accumulated_recompile_limit += versions


def compiled_blocks(recipe: Recipe, blocks: Iterable[str]) -> list[str]:
    """Return the names of the blocks that a recipe of compiled blocks compiles."""
    eager = selective_blocks(recipe.segments)
    return [name for name in blocks if name not in eager]


def compile_model(
    model: nn.Module,
    recipe: Recipe,
    undo: Undo,
    compile_forward: Callable[[nn.Module], Callable[..., object]] = compiled_forward,
) -> None:
    """Compile the model's forward, if the recipe says so, once segments are applied."""
    if recipe.compile == "model":
        undo.set_attribute(model, "forward", compile_forward(model))


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside an ``OptimizedModule``, or ``model`` itself."""
    # The two share all parameters and submodules; names differ by a prefix.
    module: Any = model
    while _is_wrapper(module):
        module = module._orig_mod
    return module


def unwrap_compiled_for(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Return the model inside ``torch.compile(model)`` if the recipe changes blocks."""
    # A plan names blocks without the wrapper's prefix. The wrapper itself is not
    # changed.
    plain = unwrap_compiled(model)
    if plain is model or not (recipe.segments or recipe.loss_chunks > 1):
        return model
    warnings.warn(
        "run.model is the model without torch.compile: compiled code chooses for "
        f"itself what it saves and recomputes, and the plan {_WHY}",
        stacklevel=3,
    )
    return plain


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of the compiled modules in ``model``; ``""`` is the model."""
    return [
        name
        for name, module in model.named_modules()
        if _is_wrapper(module)
        or module.__dict__.get(_COMPILED_CALL) is not None
        or _plain_forward(module) is not None
    ]


def disable_compile(
    model: nn.Module, undo: Undo, warn_of: Recipe | None = None
) -> None:
    """Run every compiled module in ``model`` eagerly until undone.

    Covers ``module.compile()``, ``torch.compile(module)`` as a submodule and
    ``module.forward = torch.compile(module.forward)``; not compiled functions that a
    forward calls, which save the same tensors in every plan.

    Only instance attributes of the model change. ``warn_of``: what is applied, to warn
    if a module was compiled.
    """
    names = compiled_modules(model)
    if not names:
        return
    if warn_of is not None:
        why = (
            "compiled code chooses for itself what it saves and recomputes, and the "
            f"plan {_WHY}"
            if warn_of.compile == "none"
            else f'the plan (compile="{warn_of.compile}") compiles in its own way.'
        )
        warnings.warn(
            f"torch.compile is switched off for {_names(names)} until run.undo(): "
            f"{why}",
            stacklevel=4,
        )
    modules = dict(model.named_modules())
    for module in (modules[name] for name in names):
        undo.hide_attribute(module, _COMPILED_CALL)
        forward = _plain_forward(module)
        if _is_wrapper(module):
            undo.set_attribute(module, "forward", unwrap_compiled(module).__call__)
        elif forward is not None:
            undo.set_attribute(module, "forward", forward)


def warn_compiled_unverified(model: nn.Module) -> None:
    """Warn that the plan does not predict the memory of compiled modules."""
    names = compiled_modules(model)
    if names:
        warnings.warn(
            f"{_names(names, first=True)} compiled, and the plan's bytes and times "
            "are those of eager mode: compiled code may take less or more. Only "
            "verify() on the card can tell.",
            stacklevel=4,
        )


def warn_compiled_after_apply(model: nn.Module, before: int) -> None:
    """Warn if more modules are compiled than the ``before`` at ``apply``."""
    names = compiled_modules(model)
    if len(names) > before:
        warnings.warn(
            f"{_names(names, first=True)} compiled after apply: blocks that the plan "
            "recomputes or offloads run eagerly, and bytes and times of the rest are "
            "not those of the plan. Only verify() on the card can tell.",
            stacklevel=4,
        )


def _is_wrapper(module: nn.Module) -> bool:
    """Whether this is an ``OptimizedModule``, what ``torch.compile`` returns."""
    # Importing dynamo takes seconds; without it there is no wrapper.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _plain_forward(module: nn.Module) -> Callable[..., object] | None:
    """Return the original of an instance's compiled ``forward``; None if none is."""
    forward = module.__dict__.get("forward")
    return getattr(forward, _ORIGINAL_FUNCTION, None)


def _names(names: list[str], *, first: bool = False) -> str:
    """Format module names: a name, or a name and how many; ``first``: with a verb."""
    if names == [""]:
        return "The model is" if first else "the model"
    shown = "the model" if names[0] == "" else repr(names[0])
    if len(names) > 1:
        shown += f" and {len(names) - 1} more"
    if not first:
        return shown
    return shown[0].upper() + shown[1:] + (" is" if len(names) == 1 else " are")
