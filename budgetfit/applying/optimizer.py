"""Build the optimizer that a recipe names, as transformers' Trainer builds it."""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import FakeTensor

from budgetfit.applying.adamw_8bit import PAGED_NOTE, adamw_8bit, paged_adamw_8bit
from budgetfit.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

LEARNING_RATE = 5e-5  # transformers' default

# Those whose step takes all parameters at once on CUDA when nobody asked for anything
# (torch.optim.optimizer._default_to_fused_or_foreach). torch's Adafactor does not.
_FOREACH_BY_DEFAULT = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def make_optimizer(
    optimizer: str | Callable[..., Optimizer],
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float = LEARNING_RATE,
    device_type: str,
) -> Optimizer:
    """Build an optimizer over the parameters that are trained.

    On CUDA, ``foreach`` and ``fused`` are said explicitly, with the values that torch
    would choose: fake tensors that stand for CUDA fail torch's own test for them
    (cuda-memory M44), and the traced program must be the one that runs.

    Args:
        optimizer: A name of transformers' ``optim`` (weight decay 0, as its default),
            or a callable that takes the list of parameters.
        parameters: Those without ``requires_grad`` are left out.
        lr: Learning rate; a callable brings its own.
        device_type: ``"cuda"`` or ``"cpu"``.

    Raises:
        InputError: If the name is unknown or needs a library beyond torch and
            transformers, the callable returns no optimizer, or nothing is trained.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise InputError(
            "The model has no trainable parameter: requires_grad is False everywhere."
        )
    if callable(optimizer):
        made = optimizer(trained)
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(
                f"The optimizer callable returned {type(made).__name__}, which is no "
                "torch.optim.Optimizer. Use for example "
                "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
            )
    else:
        made = _find_maker(optimizer)(trained, lr)
    if runs_as_on_cuda(trained, device_type):
        _say_foreach(made)
    return made


def runs_as_on_cuda(parameters: list[torch.nn.Parameter], device_type: str) -> bool:
    """Whether these are CUDA's parameters, or fake ones that stand for them."""
    return device_type == "cuda" or any(
        isinstance(parameter, FakeTensor) for parameter in parameters
    )


def qualified_name(function: Callable[..., object]) -> str:
    """Return ``module.qualname``; a partial is named after its function."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _say_foreach(optimizer: Optimizer) -> None:
    """Write down the choice that torch would make on CUDA."""
    if type(optimizer) not in _FOREACH_BY_DEFAULT:
        return
    for group in (optimizer.defaults, *optimizer.param_groups):
        undecided = group.get("foreach") is None and not group.get("fused")
        if undecided and not group.get("differentiable"):
            group["foreach"] = True


def _find_maker(name: object) -> Callable[[list[Any], float], Optimizer]:
    if isinstance(name, str) and name in _MAKERS:
        return _MAKERS[name]
    supported = ", ".join(_MAKERS)
    if isinstance(name, str) and name in _needs_another_library():
        raise InputError(
            f"Optimizer {name!r} needs a library that budgetfit cannot plan for yet. "
            f"Use one of: {supported}; or a callable that takes the parameters."
        )
    nearest = difflib.get_close_matches(str(name), _MAKERS, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise InputError(
        f"{name!r} is not an optimizer.{hint} Use one of: {supported}; or a callable "
        "that takes the parameters."
    )


def _needs_another_library() -> set[str]:
    from transformers.training_args import OptimizerNames  # noqa: PLC0415 - slow import

    return {name.value for name in OptimizerNames} - set(_MAKERS)


def _adafactor(parameters: list[Any], lr: float) -> Optimizer:
    from transformers.optimization import Adafactor  # noqa: PLC0415 - slow import

    return Adafactor(parameters, lr=lr, scale_parameter=False, relative_step=False)


def _adamw(parameters: list[Any], lr: float, *, fused: bool = False) -> Optimizer:
    return torch.optim.AdamW(
        parameters, lr, (0.9, 0.999), 1e-8, 0.0, fused=True if fused else None
    )


_MAKERS: dict[str, Callable[[list[Any], float], Optimizer]] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": functools.partial(_adamw, fused=True),
    "adafactor": _adafactor,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adamw_bnb_8bit": adamw_8bit,
    "paged_adamw_8bit": paged_adamw_8bit,
}

OPTIMIZER_NAMES: tuple[str, ...] = tuple(_MAKERS)


def optimizer_notes(name: str) -> tuple[str, ...]:
    """Say what a prediction leaves out of an optimizer; () if nothing."""
    return (PAGED_NOTE,) if name == "paged_adamw_8bit" else ()
