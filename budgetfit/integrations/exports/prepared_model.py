"""PreparedModel: apply a plan to a model inside another library's training loop.

``Run`` is a whole training step. Trainers have their own autocast, loss scaling,
clipping, accumulation and optimizer step. The rest (checkpointing, chunked loss, weight
dtypes) is set up here, by the same code as in ``Run``, and undone afterwards.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import nn

from budgetfit.applying.applied_models import claim
from budgetfit.applying.checkpointing.apply_segments import apply_segments
from budgetfit.applying.checkpointing.recipe_application import instance_flags
from budgetfit.applying.loss.chunked_loss import ChunkedLoss, chunk_loss
from budgetfit.applying.optimizers.factory import OPTIMIZER_NAMES
from budgetfit.applying.optimizers.for_recipe import make_recipe_optimizer
from budgetfit.applying.precision import apply_precision, cast_batch, make_scaler
from budgetfit.applying.torch_compile import compile_blocks, compile_model
from budgetfit.applying.training_modes import TrainingModes
from budgetfit.applying.undo import Undo
from budgetfit.applying.zero import input_precision
from budgetfit.core.plan import Plan
from budgetfit.core.precision import Precision, find_precision
from budgetfit.errors import InputError
from budgetfit.integrations.exports.watched_loop import WatchedLoop
from budgetfit.integrations.peft import has_adapters, loading_code
from budgetfit.workload.model_check import check_same_model, is_same_model
from budgetfit.workload.settings_check import warn_changed_settings

# A model sets attributes in its first step, and is compiled once more.
_COMPILING = {"none": 0, "blocks": 1, "model": 2}
_FLAGS = ("gradient_checkpointing", "_gradient_checkpointing_func", "forward")


class PreparedModel:
    """A model with a plan applied, until ``undo``.

    It is switched to training mode, as by every trainer. Not chunked is a loss that a
    library has replaced, not cast are weights that DeepSpeed's engine has. Where
    ``by_arguments`` those of a library are compared before: they set tf32, and
    settings are not looked for in the loop.

    Raises:
        InputError: If the model is not the planned one; it is then unchanged.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        *,
        chunks_loss: bool = True,
        casts_weights: bool = True,
        by_arguments: bool = False,
    ) -> None:
        self.model = model
        self._plan = plan
        self._compiling = _COMPILING[plan.recipe.compile]  # micro-batches to come
        policy = find_precision(plan.recipe.precision)
        with Undo() as self._undo:
            claim(model, self, self._undo)
            if casts_weights:
                cast_weights(model, policy, self._undo, sets_tf32=not by_arguments)
            TrainingModes(model)  # not undone, as with every trainer
            self._take_back = self._applied()
            self._undo.add(self._undo_checkpointing)
            compile_model(model, plan.recipe, self._undo)
            chunked: ChunkedLoss | None = None
            if plan.recipe.loss_chunks > 1 and chunks_loss:
                chunked = chunk_loss(model, plan.recipe.loss_chunks, self._undo)
            loop = WatchedLoop(plan, model)
            if not by_arguments:
                loop.watch_settings(model, self._undo)
            inputs = input_precision(plan.recipe)
            forward = _PlannedForward(model, loop, inputs, chunked)
            self._undo.set_attribute(model, "forward", forward)
        self._flags = instance_flags(model, _FLAGS)

    def restore(self) -> bool:
        """Apply checkpointing again if something replaced it; return whether so."""
        if instance_flags(self.model, _FLAGS) == self._flags:
            return False
        self._undo_checkpointing()
        self._take_back = self._applied()
        self._flags = instance_flags(self.model, _FLAGS)
        return True

    def after_backward(self) -> None:
        """Empty the allocator's cache if this micro-batch compiled, as ``Run`` does."""
        # Kernels were timed in buffers that would stay in it. ``Run`` drops the
        # results, too; a trainer goes on with them.
        if self._compiling:
            self._compiling -= 1
            torch.cuda.empty_cache()  # no-op without CUDA

    def undo(self) -> None:
        """Restore blocks, loss and dtypes of buffers.

        Weights keep the dtype that they were trained in, so that saving loses no
        precision. A second call does nothing.
        """
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _applied(self) -> Undo:
        """Compile and checkpoint blocks as planned; returns what reverts that."""
        recipe = self._plan.recipe
        with Undo() as undo:
            compile_blocks(self.model, recipe, self._plan.model.blocks, undo)
            in_graph = recipe.compile == "model"
            undo.add(apply_segments(self.model, recipe.segments, in_graph=in_graph))
        return undo

    def _undo_checkpointing(self) -> None:
        self._take_back()


def prepare(plan: Plan, model: nn.Module) -> PreparedModel:
    """Apply a plan to the planned model, which may be contained in ``model``.

    Raises:
        InputError: If it is not the planned model; it is then unchanged.
    """
    planned = find_planned(plan, model)
    warn_changed_settings(plan, planned)
    return PreparedModel(plan, planned)


def find_planned(plan: Plan, module: nn.Module) -> nn.Module:
    """Find the planned model, ``module`` or a submodule; refuse others."""
    inside = [*module.modules()] if isinstance(module, nn.Module) else []
    found = [each for each in inside if is_same_model(plan, each)]
    # A wrapper has as many parameters as the wrapped model, but other block names.
    blocks = set(plan.model.blocks)
    named = [
        each for each in found or inside if blocks <= dict(each.named_modules()).keys()
    ]
    if not found:
        _check_adapters(plan, module)
        check_same_model(plan, (named or [module])[0])
    return (named or found)[0]


def _check_adapters(plan: Plan, module: nn.Module) -> None:
    """Refuse a base without adapters: the trainer's model cannot be replaced."""
    if plan.adapter is not None and not has_adapters(module):
        several = plan.recipe.ranks > 1
        code = loading_code(plan.adapter, plan.model.class_name, several=several)
        raise InputError(
            f"The plan trains {plan.adapter.describe()}, and this model has no "
            f"adapters. Hand in the model that has them, for example:\n{code}"
        )


def cast_weights(
    model: nn.Module, policy: Precision, undo: Undo, *, sets_tf32: bool
) -> None:
    """Apply a dtype policy; undoing restores all but the weights' dtypes."""
    device = next(model.parameters(), torch.empty(0)).device.type
    before = {each: each.dtype for each in model.parameters()}
    # The tf32 flag exists only for CUDA.
    put_back = apply_precision(model, policy, device if sets_tf32 else "cpu")
    cast = [each for each, dtype in before.items() if each.dtype != dtype]
    undo.add(_undo_around, put_back, cast)


def make_plan_optimizer(
    plan: Plan, parameters: Iterable[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """Build the planned optimizer; with optimizer in backward its ``step`` is a no-op.

    Raises:
        InputError: If these are groups, or the plan only stores the name of an
            optimizer function.
    """
    parameters = list(parameters)
    others = [each for each in parameters if not isinstance(each, torch.Tensor)]
    if others:
        raise InputError(
            f"make_optimizer takes model.parameters(), and got a "
            f"{type(others[0]).__name__} among them. For groups of parameters, plan "
            "again with a function that makes the optimizer: "
            "plan(..., optimizer=function)."
        )
    name = plan.recipe.optimizer
    function = getattr(plan.source, "optimizer", None)
    if function is None and name not in OPTIMIZER_NAMES:
        raise InputError(
            f"The plan's optimizer is the function {name}, which a saved plan only "
            "names. Call it yourself: optimizer = your_function(parameters)."
        )
    kind = parameters[0].device.type if parameters else "cpu"
    return make_recipe_optimizer(
        plan.recipe,
        name if function is None else function,
        parameters,
        lr=lr,
        device_type=kind,
        scaler=make_scaler(find_precision(plan.recipe.precision), kind),
        undo=Undo(),  # its hooks stay for its lifetime
    )


class _PlannedForward:
    """Replacement forward of the model: watches, casts float inputs, defers logits.

    Not a hook: accelerate's autocast is inside of the call, and outside of this.

    An object instead of a closure, so that a deep copy of the model works
    independently.
    """

    def __init__(
        self,
        model: nn.Module,
        loop: WatchedLoop,
        policy: Precision,
        chunked: ChunkedLoss | None,
    ) -> None:
        functools.update_wrapper(self, model.forward)
        self.__wrapped__: Callable[..., Any] = model.forward
        self._model = model
        self._loop = loop
        self._policy = policy
        self._chunked = chunked

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model."""
        self._loop.before_forward(self._model, args, kwargs)
        first = next(self._model.parameters(), torch.empty(0))
        # Weights that DeepSpeed has in bf16 are fp32 until it has them.
        if self._policy.weights == "bf16" and first.dtype != torch.float32:
            args, kwargs = cast_batch((args, kwargs), self._policy, first.device)
        trains = self._model.training and torch.is_grad_enabled()
        if self._chunked is None or not trains:
            return self.__wrapped__(*args, **kwargs)
        with self._chunked.training_forward():
            return self.__wrapped__(*args, **kwargs)


def _undo_around(put_back: Undo, weights: list[nn.Parameter]) -> None:
    """Undo a cast of everything but these parameters, which are detached meanwhile."""
    kept = [(each, each.data, each.grad) for each in weights]
    for each in weights:
        each.grad = None
        each.data = each.data.new_empty(0)
    try:
        put_back()
    finally:
        for each, data, gradient in kept:
            each.data, each.grad = data, gradient
