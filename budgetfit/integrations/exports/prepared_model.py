"""A model that does its part of a plan inside somebody else's training loop.

``Run`` is a whole training step. Trainers have their own: they autocast, scale, clip,
accumulate and step. What is left for the model to do is set up here, by the same code
that ``Run`` uses, and taken back afterwards.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from budgetfit.applying.applied_models import claim
from budgetfit.applying.checkpointing.checkpoint import apply_segments
from budgetfit.applying.checkpointing.recipe_application import flags_of
from budgetfit.applying.loss.chunked_loss import ChunkedLoss, chunk_loss
from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES
from budgetfit.applying.optimizers.for_recipe import optimizer_of
from budgetfit.applying.precision import apply_precision, cast_batch, make_scaler
from budgetfit.applying.training_modes import TrainingModes
from budgetfit.applying.undo import Undo
from budgetfit.core.precision import Precision, find_precision
from budgetfit.errors import InputError
from budgetfit.integrations.peft import code, has_adapters
from budgetfit.workload.model_check import check_same_model, is_same_model
from budgetfit.workload.settings_check import warn_of_other_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from budgetfit.core.plan import Plan

_FLAGS = ("gradient_checkpointing", "_gradient_checkpointing_func", "forward")


class PreparedModel:
    """What was done to a model, until undone.

    Args:
        plan: What to carry out.
        model: The planned model, changed in place; switched to training mode if it is
            in evaluation mode, as every trainer does.
        chunks_loss: Whether to cut the loss if the plan does; not where a library has
            put a loss of its own in the model's place.
        sets_tf32: Whether to set torch's switch for fp32 products on CUDA; not where a
            library has set it, in its own way.

    Attributes:
        model: The model handed in.

    Raises:
        InputError: If model and plan do not go together; the model is then as it was.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        *,
        chunks_loss: bool = True,
        sets_tf32: bool = True,
    ) -> None:
        self.model = model
        self._segments = plan.recipe.segments
        policy = find_precision(plan.recipe.precision)
        with Undo() as self._undo:
            claim(model, self, self._undo)
            cast_weights(model, policy, self._undo, sets_tf32=sets_tf32)
            TrainingModes(model)  # stays so, as with every trainer
            self._take_back = apply_segments(model, self._segments)
            self._undo.add(self._take_segments_back)
            chunked: ChunkedLoss | None = None
            if plan.recipe.loss_chunks > 1 and chunks_loss:
                chunked = chunk_loss(model, plan.recipe.loss_chunks, self._undo)
            if chunked is not None or policy.weights == "bf16":
                forward = _PlannedForward(model, policy, chunked)
                self._undo.set_on(model, "forward", forward)
        self._flags = flags_of(model, _FLAGS)

    def restore(self) -> bool:
        """Put the segments back if something has changed how blocks are called.

        Returns:
            Whether that was so.
        """
        if flags_of(self.model, _FLAGS) == self._flags:
            return False
        self._take_segments_back()
        self._take_back = apply_segments(self.model, self._segments)
        self._flags = flags_of(self.model, _FLAGS)
        return True

    def undo(self) -> None:
        """Give back the plain model: its blocks, its loss and its buffers' dtypes.

        Weights keep the dtype that they were trained in, so that no digit is lost
        before they are saved. A second call does nothing.
        """
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def _take_segments_back(self) -> None:
        self._take_back()


def prepare(plan: Plan, model: nn.Module) -> PreparedModel:
    """Make the planned model, or the one that ``model`` holds, do as planned.

    Raises:
        InputError: If it is not the planned model; it is then as it was.
    """
    planned = find_planned(plan, model)
    warn_of_other_settings(plan, planned)
    return PreparedModel(plan, planned)


def find_planned(plan: Plan, module: nn.Module) -> nn.Module:
    """Return the planned model: ``module`` or one in it.

    Raises:
        InputError: If it is in there nowhere.
    """
    found = [
        each
        for each in (module.modules() if isinstance(module, nn.Module) else ())
        if is_same_model(plan, each)
    ]
    if not found:
        _ask_for_adapters(plan, module)
        check_same_model(plan, module)
    # A wrapper has as many parameters as what it wraps, but other names for blocks.
    blocks = set(plan.model.blocks)
    named = [each for each in found if blocks <= dict(each.named_modules()).keys()]
    return (named or found)[0]


def _ask_for_adapters(plan: Plan, module: nn.Module) -> None:
    """Refuse a base that has no adapters yet: a trainer's model is not exchanged."""
    if plan.adapter is not None and not has_adapters(module):
        raise InputError(
            f"The plan trains {plan.adapter.describe()}, and this model has no "
            f"adapters. Hand in the model that has them, for example:\n"
            f"{code(plan.adapter)}"
        )


def cast_weights(
    model: nn.Module, policy: Precision, undo: Undo, *, sets_tf32: bool
) -> None:
    """Carry a dtype policy out; undoing gives back all but the weights' dtypes."""
    device = next(model.parameters(), torch.empty(0)).device.type
    before = {each: each.dtype for each in model.parameters()}
    # Only on CUDA is there a switch to set.
    put_back = apply_precision(model, policy, device if sets_tf32 else "cpu")
    cast = [each for each, dtype in before.items() if each.dtype != dtype]
    undo.add(_undo_around, put_back, cast)


def make_plan_optimizer(
    plan: Plan, parameters: Iterable[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """Build the planned optimizer; one that steps in backward leaves ``step`` nothing.

    Raises:
        InputError: If the plan only names a function that builds it.
    """
    parameters = list(parameters)
    name = plan.recipe.optimizer
    function = getattr(plan.source, "optimizer", None)
    if function is None and name not in OPTIMIZER_NAMES:
        raise InputError(
            f"The plan's optimizer is the function {name}, which a saved plan only "
            "names. Call it yourself: optimizer = your_function(parameters)."
        )
    kind = parameters[0].device.type if parameters else "cpu"
    return optimizer_of(
        plan.recipe,
        name if function is None else function,
        parameters,
        lr=lr,
        device_type=kind,
        scaler=make_scaler(find_precision(plan.recipe.precision), kind),
        undo=Undo(),  # its hooks stay as long as it is used
    )


class _PlannedForward:
    """Stands in for the model's forward: casts floats, holds logits back in training.

    A plain object and no closure, so that a deep copy of the model is a working model
    of its own.
    """

    def __init__(
        self, model: nn.Module, policy: Precision, chunked: ChunkedLoss | None
    ) -> None:
        functools.update_wrapper(self, model.forward)
        self.__wrapped__: Callable[..., Any] = model.forward
        self._model = model
        self._policy = policy
        self._chunked = chunked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the model."""
        if self._policy.weights == "bf16":
            device = next(self._model.parameters()).device
            args, kwargs = cast_batch((args, kwargs), self._policy, device)
        trains = self._model.training and torch.is_grad_enabled()
        if self._chunked is None or not trains:
            return self.__wrapped__(*args, **kwargs)
        with self._chunked.training_call():
            return self.__wrapped__(*args, **kwargs)


def _undo_around(put_back: Undo, weights: list[nn.Parameter]) -> None:
    """Undo a cast of everything but these: they are out of the way meanwhile."""
    kept = [(each, each.data, each.grad) for each in weights]
    for each in weights:
        each.grad = None
        each.data = each.data.new_empty(0)
    try:
        put_back()
    finally:
        for each, data, gradient in kept:
            each.data, each.grad = data, gradient
