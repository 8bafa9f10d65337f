"""Build an optimizer by its name, as transformers' Trainer does."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.applying.optimizers import bitsandbytes, cpu_offload, torch_only, torchao
from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

DEFAULT_LEARNING_RATE = 5e-5  # transformers' default

# Those with foreach=True by default on CUDA
# (torch.optim.optimizer._default_to_fused_or_foreach). torch's Adafactor has not.
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
    lr: float = DEFAULT_LEARNING_RATE,
    device_type: str,
) -> Optimizer:
    """Build an optimizer over the trainable parameters.

    On CUDA, ``foreach`` is set explicitly to the value that torch would choose: fake
    tensors that represent CUDA ones fail torch's own test, and the traced program must
    be the one that runs. On fake tensors bitsandbytes' and torchao's optimizers are
    replaced by fake ones that allocate the same states.

    Args:
        optimizer: A name of transformers' ``optim`` (weight decay 0, as its default) or
            one of ``OPTIMIZER_NAMES``; or a callable that takes the list of parameters.
        parameters: Those without ``requires_grad`` are left out.
        lr: Learning rate; a callable brings its own.
        device_type: ``"cuda"`` or ``"cpu"``; of fake tensors, the simulated one.

    Raises:
        InputError: If the name is unknown, its library is not installed or it cannot
            be planned, the callable returns no optimizer, or no parameter is
            trainable.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise InputError(
            "The model has no trainable parameter: requires_grad is False everywhere. "
            "Unfreeze what is to be trained: parameter.requires_grad_(True)."
        )
    if callable(optimizer):
        made = _from_callable(optimizer, trained)
    else:
        made = _find_maker(optimizer)(trained, lr)
    if device_type == "cuda":
        _set_foreach(made)
    return made


def _are_fake(parameters: list[Any]) -> bool:
    return any(isinstance(parameter, FakeTensor) for parameter in parameters)


def _from_callable(
    function: Callable[..., Optimizer], trained: list[torch.nn.Parameter]
) -> Optimizer:
    try:
        made = function(trained)
    except Exception:
        if not _are_fake(trained) or "bitsandbytes" not in sys.modules:
            raise
        with _disable_current_modes():  # bitsandbytes computes its tables
            made = function(trained)
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(
            f"The optimizer callable returned {type(made).__name__}, which is no "
            "torch.optim.Optimizer. Use for example "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    _check_step(made)
    if not _are_fake(trained):
        return made
    for library in (bitsandbytes, torchao):
        fake = library.to_fake(made)
        if fake is not None:
            return fake
    return made


def _check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer that requires a closure (LBFGS).

    Raises:
        InputError: If its ``step`` cannot be called without one.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{type(optimizer).__name__} needs a closure that runs the model again, as "
            "often as it likes, so that nothing says what a step takes. Use an "
            'optimizer that needs none, for example optimizer="adamw_torch_fused".'
        )


def _set_foreach(optimizer: Optimizer) -> None:
    """Set ``foreach`` to torch's default on CUDA."""
    if type(optimizer) not in _FOREACH_BY_DEFAULT:
        return
    for group in (optimizer.defaults, *optimizer.param_groups):
        undecided = group.get("foreach") is None and not group.get("fused")
        if undecided and not group.get("differentiable"):
            group["foreach"] = True


def _find_maker(name: object) -> Callable[[list[Any], float], Optimizer]:
    if isinstance(name, str) and name in _MAKERS:
        return _MAKERS[name]
    raise _unknown_optimizer(name)


def _unknown_optimizer(name: object) -> InputError:
    """Return the error for an unsupported name, with alternatives."""
    names = ", ".join(OPTIMIZER_NAMES)
    use = f"Use one of: {names}; or a callable that takes the parameters."
    if isinstance(name, str):
        for start, reason in _REFUSED.items():
            if name.startswith(start):
                return InputError(
                    f"Optimizer {name!r} cannot be planned: {reason}. {use}"
                )
        if name in _transformers_names():
            return InputError(
                f"Optimizer {name!r} needs a library that budgetfit cannot plan for. "
                f"{use}"
            )
    nearest = difflib.get_close_matches(str(name), OPTIMIZER_NAMES, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return InputError(f"{name!r} is not an optimizer.{hint} {use}")


def _transformers_names() -> set[str]:
    from transformers.training_args import OptimizerNames  # noqa: PLC0415 - slow import

    return {name.value for name in OptimizerNames}


def _adafactor(parameters: list[Any], lr: float) -> Optimizer:
    from transformers.optimization import Adafactor  # noqa: PLC0415 - slow import

    return Adafactor(parameters, lr=lr, scale_parameter=False, relative_step=False)


def _adamw(parameters: list[Any], lr: float, *, fused: bool = False) -> Optimizer:
    refused = next((item.dtype for item in parameters if item.is_complex()), None)
    if fused and refused is not None:
        raise InputError(
            f"The model has parameters of {refused}, and torch's fused AdamW takes "
            'real numbers only. Pass optimizer="adamw_torch".'
        )
    return torch.optim.AdamW(
        parameters, lr, (0.9, 0.999), 1e-8, 0.0, fused=True if fused else None
    )


class LibraryOptimizer(NamedTuple):
    """An optimizer of a library that has to be installed for planning, too."""

    module: str
    kind: str
    options: dict[str, Any]
    install: str


_ADAM: Final = {"betas": (0.9, 0.999), "eps": 1e-8}
_SCHEDULE_FREE: Final = {
    "weight_decay": 0.0,
    "weight_lr_power": 2.0,
    "r": 0.0,
}
_IMPORTED: Final = {
    "schedule_free_adamw": LibraryOptimizer(
        "schedulefree",
        "AdamWScheduleFree",
        {**_ADAM, **_SCHEDULE_FREE, "warmup_steps": 0},
        "schedulefree",
    ),
    "schedule_free_sgd": LibraryOptimizer(
        "schedulefree",
        "SGDScheduleFree",
        {**_SCHEDULE_FREE, "warmup_steps": 0},
        "schedulefree",
    ),
    "schedule_free_radam": LibraryOptimizer(
        "schedulefree", "RAdamScheduleFree", {**_ADAM, **_SCHEDULE_FREE}, "schedulefree"
    ),
}


def _imported(name: str, parameters: list[Any], lr: float) -> Optimizer:
    known = _IMPORTED[name]
    try:
        library: Any = importlib.import_module(known.module)
    except ImportError as error:
        raise InputError(
            f"Optimizer {name!r} is {known.module}'s, which planning runs too: "
            f"pip install {known.install} ({error})."
        ) from None
    made: Any = getattr(library, known.kind)(parameters, lr=lr, **known.options)
    made.train()  # required before step(); for evaluation call eval()
    optimizer: Optimizer = made
    return optimizer


# Prefixes of names -> why they are refused.
_CALLABLE: Final = "hand in a callable that takes the parameters"
_REFUSED: Final = {
    **torch_only.REFUSED,
    "adamw_torch_xla": "it is torch_xla's, for TPUs",
    "adamw_torch_npu_fused": "it is torch_npu's, for Ascend cards",
    "adamw_anyprecision": "it is torchdistx's, which is no longer maintained; "
    + _CALLABLE,
    "galore_": "which layers it projects (optim_target_modules) is no part of a "
    "recipe; " + _CALLABLE,
    "apollo_": "which layers it projects (optim_target_modules) is no part of a "
    "recipe; " + _CALLABLE,
    "lomo": "it runs the backward pass itself; optimizer='sgd' with "
    "optimizer_in_backward=True is the same step",
    "adalomo": "it runs the backward pass itself; optimizer='adafactor' with "
    "optimizer_in_backward=True frees gradients the same way",
    "grokadamw": "it keeps its states in host memory and brings three of them to the "
    "card for each tensor, which a trace cannot tell apart",
    "stable_adamw": "on CUDA it runs Triton kernels, which fake tensors cannot; hand "
    "in a callable: lambda parameters: optimi.StableAdamW(parameters, lr=5e-5, "
    "triton=False)",
}

_MAKERS: dict[str, Callable[[list[Any], float], Optimizer]] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": functools.partial(_adamw, fused=True),
    "adafactor": _adafactor,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    **{
        name: functools.partial(library.make, name)
        for library in (bitsandbytes, torchao)
        for name in library.SPECS
    },
    **{name: functools.partial(torch_only.make, name) for name in torch_only.KINDS},
    cpu_offload.NAME: cpu_offload.make,
    **{name: functools.partial(_imported, name) for name in _IMPORTED},
}

OPTIMIZER_NAMES: tuple[str, ...] = tuple(_MAKERS)


def optimizer_notes(name: str) -> tuple[str, ...]:
    """Return what an estimate leaves out of an optimizer; () if nothing."""
    notes = []
    if name in bitsandbytes.SPECS:
        spec = bitsandbytes.SPECS[name]
        if spec.is_paged:
            notes.append(bitsandbytes.PAGED_NOTE)
        if spec.bits == 8:  # noqa: PLR2004
            notes.append(bitsandbytes.TRAINER_NOTE)
    elif name in torchao.SPECS:
        notes.append(torchao.COMPILE_NOTE)
    elif name == cpu_offload.NAME:
        notes.append(cpu_offload.NOTE)
    return tuple(f"{name}: {note}" for note in notes)
