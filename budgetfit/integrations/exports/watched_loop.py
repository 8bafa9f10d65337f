"""Watch a training loop: warn where it is not the planned one.

Its settings are not asked for: they are seen in a forward of training, and in the first
step of an optimizer.
"""

import functools
import inspect
import warnings
import weakref
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES
from budgetfit.applying.optimizers.for_recipe import make_recipe_optimizer
from budgetfit.applying.out_of_memory.expected_batch import ExpectedBatch
from budgetfit.applying.precision import DTYPE_NAMES, make_scaler
from budgetfit.applying.run.accumulation import version_of
from budgetfit.applying.undo import Undo
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.core.samples.sample_dims import FIRST_DIM, SINGLE_TENSOR
from budgetfit.errors import InputError

# With weight decay they add it to a copy of all gradients, on CUDA (foreach).
_COPYING_GRADIENTS: Final = (
    torch.optim.SGD,
    torch.optim.Adadelta,
    torch.optim.NAdam,
    torch.optim.RMSprop,
)


class WatchedLoop:
    """Warns of larger batches, and once of other settings.

    No closure: a model is pickled with it.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        dims = plan.model.batch_dims or FIRST_DIM
        self._recipe = plan.recipe
        self._batch = ExpectedBatch.of(plan.model.batch, self._recipe.batch_size, dims)
        self._weights = _trainable_dtypes(model)
        self._update_due = self._forward_due = False
        self._gradients: list[tuple[int, int]] = []
        self._micro_batches = 0

    def watch_settings(self, model: nn.Module, undo: Undo) -> None:
        """Look at settings, too, until the first update.

        Under DeepSpeed and FSDP2 at the optimizer's alone, if at all: the engine has
        weights, gradients and autocast of its own.
        """
        if self._recipe.zero_stage is not None or self._recipe.optimizer_in_backward:
            return
        self._update_due = True
        self._forward_due = self._recipe.engine != "fsdp2"
        weights = weakref.ref(model)  # the process has the hooks, until undone
        for register, look in (
            (register_optimizer_step_pre_hook, self._before_update),
            (register_optimizer_step_post_hook, self._after_update),
        ):
            handle = register(functools.partial(look, weights))
            undo.add(handle.remove)
            weakref.finalize(model, handle.remove)

    def before_forward(
        self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> None:
        """Look at a batch, and at what else is seen as the forward begins."""
        if not model.training or not torch.is_grad_enabled():
            return  # TRL generates in training mode
        if torch.compiler.is_compiling():
            return
        batch: Any = kwargs
        if args and any(name in self._batch.shapes for name in (SINGLE_TENSOR, "0")):
            batch = args[0] if SINGLE_TENSOR in self._batch.shapes else args
        elif args:
            names = inspect.signature(model.forward).parameters
            batch = {**dict(zip(names, args, strict=False)), **kwargs}
        self._batch.warn_if_larger(batch)
        if not self._forward_due:
            return
        if not self._micro_batches:
            warn_of_settings(self._other_precision(model))
        gradients = [
            (id(each.grad), version_of(each.grad))
            for each in model.parameters()
            if each.grad is not None
        ]
        # Not a second forward before the same backward; from 1 again where a GradScaler
        # has left an update out, or a forward was run before training.
        if not gradients:
            self._micro_batches = 1
        elif gradients != self._gradients:
            self._micro_batches += 1
        self._gradients = gradients

    def _before_update(
        self, model: weakref.ref[nn.Module], optimizer: Optimizer, *_: object
    ) -> None:
        """Look at the optimizer, before it makes its states."""
        if self._update_due and _trains(optimizer, model()):
            warn_of_settings(other_optimizer(self._recipe, optimizer))

    def _after_update(
        self, model: weakref.ref[nn.Module], optimizer: Optimizer, *_: object
    ) -> None:
        """Compare the number of micro-batches of the first update."""
        # Lightning runs the last one inside of the step.
        if not self._update_due or not _trains(optimizer, model()):
            return
        planned, found = self._recipe.gradient_accumulation_steps, self._micro_batches
        if self._forward_due and found not in (0, planned):
            warn_of_settings(
                [f"gradient_accumulation_steps={found} (planned: {planned})"]
            )
        self._update_due = self._forward_due = False

    def _other_precision(self, model: nn.Module) -> list[str]:
        device = next(model.parameters(), torch.empty(0)).device.type
        dtype = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else None
        )
        now = None if dtype is None else DTYPE_NAMES[dtype]
        planned = find_precision(self._recipe.precision).autocast
        other = []
        if now != planned:
            other.append(f"autocast to {now} (planned: {planned})")
        weights = _trainable_dtypes(model)
        if weights != self._weights:
            names = (", ".join(sorted(each)) for each in (weights, self._weights))
            other.append("weights in {} (planned: {})".format(*names))
        return other


def warn_of_settings(other: list[str]) -> None:
    """Warn of settings that are not the planned ones, if there are any."""
    if other:
        warnings.warn(
            f"Training with {', '.join(other)}: the plan's prediction is for other "
            "settings.",
            stacklevel=3,
        )


def other_optimizer(recipe: Recipe, optimizer: Any, chosen: str = "") -> list[str]:
    """Return in what an optimizer has other states than planned; nothing if unknown.

    ``chosen``: its name among the Trainer's, if it has one.
    """
    if recipe.optimizer not in OPTIMIZER_NAMES:
        return []
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # inside of accelerate's or DeepSpeed's
    found = f"optim={chosen}" if chosen else type(optimizer).__name__
    by_name = [f"{found} (planned: {recipe.optimizer})"]
    try:
        planned = make_recipe_optimizer(
            recipe,
            recipe.optimizer,
            [nn.Parameter(torch.empty(1, 1))],  # Muon takes matrices
            lr=1.0,
            device_type="cpu",
            scaler=make_scaler(find_precision(recipe.precision), "cpu"),
            undo=Undo(),
        )
    except InputError:  # its library is not installed, so it is another one
        return by_name if chosen != recipe.optimizer else []
    kinds = [_kind(each) for each in (optimizer, planned)]
    used = [_used_settings(each) for each in (optimizer, planned)]
    if kinds[0] == kinds[1] and used[0].keys() == used[1].keys():
        return []
    if chosen not in ("", recipe.optimizer):
        return by_name
    if kinds[0] != kinds[1]:
        return [f"{type(optimizer).__name__} (planned: {type(planned).__name__})"]
    now, then = optimizer.defaults | used[0], planned.defaults | used[1]
    return [
        f"{name}={now.get(name)} (planned: {then.get(name)})"
        for name in sorted(used[0].keys() ^ used[1].keys())
    ]


def _kind(optimizer: object) -> tuple[object, ...]:
    """Return the class of an optimizer, and what bitsandbytes has beside it."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return type(optimizer), bits, getattr(optimizer, "is_paged", False)


def _used_settings(optimizer: Any) -> dict[str, Any]:
    """Return the settings of an optimizer that are not off: states are made by them."""
    # momentum=0.8 takes what momentum=0.9 does; on CUDA foreach=None is True.
    ignored = {"lr"}
    if not isinstance(optimizer, _COPYING_GRADIENTS):
        ignored.add("weight_decay")
    return {
        name: value
        for group in optimizer.param_groups
        for name, value in group.items()
        if (value or (name == "foreach" and value is None))
        and name in optimizer.defaults.keys() - ignored
    }


def _trains(optimizer: Optimizer, model: nn.Module | None) -> bool:
    weights = set(() if model is None else model.parameters())
    groups = optimizer.param_groups
    return any(each in weights for group in groups for each in group["params"])


def _trainable_dtypes(model: nn.Module) -> set[str]:
    return {
        str(each.dtype).removeprefix("torch.")
        for each in model.parameters()
        if each.requires_grad
    }
