"""Build an optimizer by its name, as transformers' Trainer does."""

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.applying.optimizers import bitsandbytes, cpu_offload, torchao
from budgetfit.applying.optimizers.library_optimizer import are_fake
from budgetfit.errors import InputError

DEFAULT_LEARNING_RATE = 5e-5  # transformers' default

# Those with foreach=True by default on CUDA
# (torch.optim.optimizer._default_to_fused_or_foreach). torch's Adafactor has not.
_FOREACH_BY_DEFAULT = (
    *(torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam),
    *(torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)


def make_optimizer(
    optimizer: str | Callable[..., Optimizer],
    parameters: Iterable[torch.nn.Parameter],
    *,
    lr: float = DEFAULT_LEARNING_RATE,
    device_type: str,
) -> Optimizer:
    """Build an optimizer over the parameters that are trainable.

    On CUDA, ``foreach`` is set explicitly to the value that torch would choose: fake
    tensors that represent CUDA ones fail torch's own test, and the traced program must
    be the one that runs. On fake tensors bitsandbytes' and torchao's optimizers are
    replaced by fake ones that allocate the same states.

    ``optimizer``: a name of transformers' ``optim`` (weight decay 0, as its default) or
    one of ``OPTIMIZER_NAMES``; or a callable that takes the list of parameters and
    brings its own learning rate. ``device_type``: of fake tensors, the simulated one.

    Raises:
        InputError: If the name is unknown, its library is not installed or it cannot be
            planned, the callable returns no optimizer, or no parameter is trainable.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise InputError(
            "The model has no trainable parameter: requires_grad is False everywhere. "
            "Unfreeze what is to be trained: parameter.requires_grad_(True)."
        )
    if callable(optimizer):
        made = _from_callable(optimizer, trained)
    elif (make := _MAKERS.get(str(optimizer))) is not None:
        made = make(trained, lr)
    else:
        raise _unknown_optimizer(optimizer)
    if device_type == "cuda":
        _set_foreach(made)
    return made


def _from_callable(
    function: Callable[..., Optimizer], trained: list[Parameter]
) -> Optimizer:
    try:
        made = function(trained)
    except Exception:
        if not are_fake(trained) or "bitsandbytes" not in sys.modules:
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
    if not are_fake(trained):
        return made
    for library in (bitsandbytes, torchao):
        fake = library.to_fake(made)
        if fake is not None:
            return fake
    return made


def _check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer that requires a closure (LBFGS)."""
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
        refused = group.get("differentiable") or (
            isinstance(optimizer, torch.optim.Adam)
            and isinstance(group["lr"], torch.Tensor)
            and not group["capturable"]
        )
        if undecided and not refused:
            group["foreach"] = True


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
        if name in transformers_names():
            return InputError(
                f"Optimizer {name!r} needs a library that budgetfit cannot plan for. "
                f"{use}"
            )
    known = {**{each: repr(each) for each in OPTIMIZER_NAMES}, **_NEAREST}
    nearest = difflib.get_close_matches(str(name).lower(), known, n=1)
    hint = f" Did you mean {known[nearest[0]]}?" if nearest else ""
    return InputError(f"{name!r} is not an optimizer.{hint} {use}")


def transformers_names() -> set[str]:
    """Return the names that the installed transformers takes as ``optim``."""
    from transformers.training_args import OptimizerNames  # noqa: PLC0415 - slow import

    return {name.value for name in OptimizerNames}


def _adafactor(parameters: list[Parameter], lr: float) -> Optimizer:
    from transformers.optimization import Adafactor  # noqa: PLC0415 - slow import

    return Adafactor(parameters, lr=lr, scale_parameter=False, relative_step=False)


def _adamw(parameters: list[Parameter], lr: float, *, fused: bool = False) -> Optimizer:
    refused = next((item.dtype for item in parameters if item.is_complex()), None)
    if fused and refused is not None:
        raise InputError(
            f"The model has parameters of {refused}, and torch's fused AdamW takes "
            'real numbers only. Pass optimizer="adamw_torch".'
        )
    return torch.optim.AdamW(
        parameters, lr, (0.9, 0.999), 1e-8, 0.0, fused=True if fused else None
    )


def _muon(parameters: list[Parameter], lr: float) -> Optimizer:
    others = [tuple(each.shape) for each in parameters if each.ndim != _MATRIX]
    if others:
        raise InputError(
            f"Muon updates matrices only, and {len(others)} of the {len(parameters)} "
            f"trained tensors are none, the first of shape {others[0]}. Train adapters "
            "(method='lora', --method lora), which are matrices, or hand in a callable "
            "that gives the others to AdamW: docs/optimizers.md shows one."
        )
    return torch.optim.Muon(parameters, lr=lr, weight_decay=0.0)


_MATRIX: Final = 2  # dimensions
_ADAM: Final = {"betas": (0.9, 0.999), "eps": 1e-8}
_SCHEDULE_FREE: Final = {"weight_decay": 0.0, "weight_lr_power": 2.0, "r": 0.0}
# Of the library schedulefree: class and options. Planning runs them, too.
_IMPORTED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "schedule_free_adamw": (
        "AdamWScheduleFree",
        {**_ADAM, **_SCHEDULE_FREE, "warmup_steps": 0},
    ),
    "schedule_free_sgd": ("SGDScheduleFree", {**_SCHEDULE_FREE, "warmup_steps": 0}),
    "schedule_free_radam": ("RAdamScheduleFree", {**_ADAM, **_SCHEDULE_FREE}),
}


def _schedule_free(name: str, parameters: list[Parameter], lr: float) -> Optimizer:
    kind, options = _IMPORTED[name]
    try:
        library: Any = importlib.import_module("schedulefree")
    except ImportError as error:
        raise InputError(
            f"Optimizer {name!r} is schedulefree's, which planning runs too: "
            f"pip install schedulefree ({error})."
        ) from None
    made: Any = getattr(library, kind)(parameters, lr=lr, **options)
    made.train()  # required before step(); for evaluation call eval()
    return made


# Lower-case names of torch.optim that transformers has no name for; its "adafactor" is
# a class of its own.
TORCH_ONLY: Final[dict[str, Any]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor_torch": torch.optim.Adafactor,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
}

# Prefixes of names -> why they are refused.
_CALLABLE: Final = "hand in a callable that takes the parameters"
_REFUSED: Final = {
    "lbfgs": "each of its steps runs forward and backward several times through a "
    "closure, which a loop of batches has not",
    **dict.fromkeys(
        ("sparse_adam", "sparseadam"),
        "it takes sparse gradients only, which nothing but nn.Embedding(sparse=True) "
        "makes; optimizer='adam' takes all others",
    ),
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

# torch's class in lower case, which is no name -> the names to use
_NEAREST: Final = {"adamw": "'adamw_torch_fused' or 'adamw_torch'"}

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
    **TORCH_ONLY,
    "muon": _muon,
    cpu_offload.NAME: cpu_offload.make,
    **{name: functools.partial(_schedule_free, name) for name in _IMPORTED},
}

OPTIMIZER_NAMES: tuple[str, ...] = tuple(_MAKERS)


def steps_on_cpu(name: str) -> bool:
    """Whether an optimizer, by its name in a recipe, has kernels for the CPU."""
    libraries = "bitsandbytes.", "torchao."  # of callables
    known = name in bitsandbytes.SPECS or name in torchao.SPECS
    return not known and not name.startswith(libraries)


def optimizer_notes(name: str, engine: str | None = None) -> tuple[str, ...]:
    """Return what an estimate leaves out of an optimizer, and how shards differ."""
    notes = []
    if name in bitsandbytes.SPECS:
        spec = bitsandbytes.SPECS[name]
        if spec.is_paged:
            notes.append(bitsandbytes.PAGED_NOTE)
        if spec.bits == 8:  # noqa: PLR2004
            notes.append(bitsandbytes.TRAINER_NOTE)
    elif name in torchao.SPECS:
        notes.append(torchao.COMPILE_NOTE)
        if engine == "fsdp2":
            notes.append(torchao.SHARDS_NOTE)
    elif name == cpu_offload.NAME:
        notes.append(cpu_offload.NOTE)
    return tuple(f"{name}: {note}" for note in notes)
