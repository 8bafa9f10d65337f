"""Make a fake model ready for a loop: precision, checkpointing, optimizer, EMA copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import FakeTensor

from budgetfit.applying.checkpointing.recipe_application import RecipeApplication
from budgetfit.applying.optimizers.factory import make_optimizer
from budgetfit.applying.precision import apply_precision
from budgetfit.applying.run.setup import resolve_optimizer
from budgetfit.core.loop import Loop
from budgetfit.core.precision import Precision, find_precision
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError

if TYPE_CHECKING:
    from budgetfit.applying.loss.call_model import Loss

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass(slots=True)
class Prepared:
    """What a loop trains.

    Attributes:
        model: The fake model, in training mode.
        recipe: Applied to it, but for the precision's autocast and scaler.
        loop: The loop's settings.
        loss: The user's own loss, or None.
        optimizer_source: A name or a callable; see ``make_optimizer``.
        on_missing_loss: See ``call_model.compute_loss``.
        average: The copy of the weights that follows them, or None.
        untraced_batches: Micro-batches of an update that are loaded with the others
            where a loop loads them first, but not trained on in the trace.
    """

    model: nn.Module
    recipe: Recipe
    loop: Loop
    loss: Callable[..., torch.Tensor] | None
    optimizer_source: Any
    on_missing_loss: Callable[[], object]
    average: torch.optim.swa_utils.AveragedModel | None = None
    untraced_batches: int = 0

    @property
    def precision(self) -> Precision:
        """The recipe's."""
        return find_precision(self.recipe.precision)

    @property
    def copies(self) -> tuple[nn.Module, ...]:
        """Modules that are on the device beside the model."""
        return () if self.average is None else (self.average,)

    def make_optimizer(
        self, parameters: Sequence[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Build the recipe's optimizer as on CUDA."""
        return make_optimizer(self.optimizer_source, parameters, device_type="cuda")

    def update_average(self) -> None:
        """Let the second copy of the weights follow, if there is one."""
        if self.average is not None:
            self.average.update_parameters(self.model)


def refuse_recipe(recipe: Recipe, loop: Loop, loss: Loss | None = None) -> None:
    """Refuse what a loop cannot do by itself, and ``budgetfit.Run`` does."""
    if loop.kind == "run":
        return
    if recipe.optimizer_in_backward or recipe.loss_chunks > 1:
        raise InputError(
            f"loop={loop.kind!r} neither chunks the loss nor updates weights in the "
            "backward pass: those are done by budgetfit.Run. Use loop='run', or a "
            "recipe without loss_chunks and optimizer_in_backward."
        )
    if recipe.compile != "none":
        raise InputError(
            f"loop={loop.kind!r} is predicted without torch.compile. Use loop='run', "
            "or a recipe with compile='none'."
        )
    if loss is not None and loop.loads_update_first:
        raise InputError(
            f"loop={loop.kind!r} trains with the loss of the model, from labels in the "
            "batch. Leave loss= out, or use loop='plain'."
        )


def prepare(  # noqa: PLR0913 - a program, and what it cannot hold
    model: nn.Module,
    recipe: Recipe,
    loop: Loop,
    *,
    loss: Loss | None,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    own_checkpointing: bool,
    on_missing_loss: Callable[[], object],
) -> Prepared:
    """Apply a recipe to a fake model, as it is before a loop begins.

    Raises:
        InputError: The loop cannot carry the recipe out.
    """
    refuse_recipe(recipe, loop, loss)
    policy = find_precision(recipe.precision)
    if policy.autocast is None or not hasattr(model, "peft_config"):
        # peft has chosen the dtypes of adapters and of modules_to_save; a loop under
        # autocast casts no weights.
        apply_precision(model, policy, "cpu")
    model.train()
    average = _averaged(model) if loop.ema else None
    RecipeApplication(
        model,
        loss=loss,
        random_blocks=None,
        determinism_check="default",
        keep_own_checkpointing=own_checkpointing,
        keep_generation_cache=True,  # a Run switches it off, a loop does not
    ).apply(recipe)
    return Prepared(
        model,
        recipe,
        loop,
        loss,
        resolve_optimizer(recipe.optimizer, optimizer),
        on_missing_loss,
        average,
    )


def _averaged(model: nn.Module) -> torch.optim.swa_utils.AveragedModel:
    utils = torch.optim.swa_utils
    copied = mock.patch.object(FakeTensor, "__deepcopy__", _copied, create=True)
    with _without_hooks(model), copied:
        return utils.AveragedModel(
            model, multi_avg_fn=utils.get_ema_multi_avg_fn(0.999)
        )


def _copied(fake: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a fake tensor for ``deepcopy``; torch's own asks for its address."""
    if id(fake) not in memo:
        clone = fake.detach().clone()
        if isinstance(fake, nn.Parameter):
            clone = nn.Parameter(clone, fake.requires_grad)
        memo[id(fake)] = clone
    return memo[id(fake)]


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Leave out the trace's own hooks: a copy of the model must not have them."""
    kept = [
        (module, {name: vars(module)[name] for name in _HOOKS})
        for module in model.modules()
    ]
    for module, hooks in kept:
        vars(module).update({name: type(hooks[name])() for name in hooks})
    try:
        yield
    finally:
        for module, hooks in kept:
            vars(module).update(hooks)
