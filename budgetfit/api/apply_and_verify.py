"""``apply`` and ``verify``: train with a plan; compare real steps with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgetfit.applying.optimizers.factory import DEFAULT_LEARNING_RATE, OPTIMIZER_NAMES
from budgetfit.applying.run.run import Run
from budgetfit.applying.torch_compile import unwrap_compiled_for
from budgetfit.applying.undo import Undo
from budgetfit.core.plan import Plan
from budgetfit.core.validation import python_number
from budgetfit.core.verification import Verification
from budgetfit.errors import InputError
from budgetfit.inputs.adapter import attach_planned_adapter
from budgetfit.inputs.plan_source import (
    check_plan,
    loss_and_optimizer,
    model_reference,
    model_to_train,
    planned_batch_dims,
    resolve_model_and_batch,
)
from budgetfit.measuring.subprocess_run import verify_in_subprocess
from budgetfit.traces.loss_modules import warn_of_trainable_loss
from budgetfit.tracing.isolation.torch_state import neutral_torch_state
from budgetfit.verification.verify_plan import verify_plan

if TYPE_CHECKING:
    Loss = Callable[[Any, Any], torch.Tensor]
    Progress = Callable[[str], None]


def apply(
    plan: Plan,
    model: nn.Module | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    learning_rate: float | None = None,
) -> Run:
    """Make the model train by the plan: segments, precision, optimizer, accumulation.

    Args:
        plan: From ``plan()``, or loaded from disk.
        model: Needed where the plan has none: it was loaded, or made from a config. A
            plan with adapters adds them to a plain model, and ``undo`` removes them.
        loss: Needed where the plan was made with one and loaded; so is ``optimizer``.
        optimizer: The function that ``plan.recipe.optimizer`` names.
        learning_rate: Of an optimizer that the plan has by name; 5e-5, transformers'
            default, if left out. A function sets its own.

    Returns:
        The run: ``run.step(batch)`` for each micro-batch, ``run.undo()`` to restore the
        model. Of a model under ``torch.compile`` it trains the eager one, with a
        warning, unless the plan keeps everything.

    Raises:
        InputError: If there is no model, it is not the one that was planned, or a
            learning rate cannot be used.
    """
    check_plan(plan)
    learning_rate = python_number(learning_rate)
    _check_learning_rate(plan, learning_rate)
    if model is not None:
        model = unwrap_compiled_for(model, plan.recipe)
    with Undo() as undo:
        model = attach_planned_adapter(plan, model, undo)
        model = model_to_train(plan, model)
        loss, optimizer = loss_and_optimizer(plan, loss, optimizer)
        warn_of_trainable_loss(loss, model)
        run = Run(
            model,
            plan.recipe,
            loss=loss,
            optimizer=optimizer,
            learning_rate=DEFAULT_LEARNING_RATE
            if learning_rate is None
            else learning_rate,
            plan=plan,
            dims=planned_batch_dims(plan, model),
        )
        # The adapters are removed last.
        undo.add(run._undo)  # noqa: SLF001 - extends the undo of a run just created
        run._undo = undo  # noqa: SLF001
    return run


def _check_learning_rate(plan: Plan, learning_rate: float | None) -> None:
    if learning_rate is None:
        return
    number = isinstance(learning_rate, (int, float))
    if not number or not 0 < learning_rate <= sys.float_info.max:
        raise InputError(
            f"learning_rate must be a number above 0, for example 5e-5; got "
            f"{learning_rate!r:.80}."
        )
    if plan.recipe.optimizer not in OPTIMIZER_NAMES:
        raise InputError(
            f"The plan's optimizer is a function, {plan.recipe.optimizer}, which sets "
            "its own learning rate. Leave learning_rate= out."
        )


@neutral_torch_state()
def verify(  # noqa: PLR0913 - public API
    plan: Plan,
    model: nn.Module | str | None = None,
    *,
    batch: object = None,
    loss: Loss | str | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    steps: int = 3,
    device: str | None = None,
    fresh_process: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Run real steps of the plan and compare them with the prediction.

    At least three steps with the optimizer. On CUDA the allocated, reserved and process
    peaks are measured per phase; an out-of-memory is a result, not a crash. With
    ``device="cpu"`` gradients are compared with the unmodified model's, and live bytes
    with a replay under CPU semantics; VRAM is then not checked.

    Args:
        plan: From ``plan()``, or loaded from disk.
        model: Needed where the plan has none.
        batch: The batch to run; the planned one, with the longest samples, if left out.
            Of several (a data loader, a list of batches) the longest runs first and is
            measured, then some of the others. ``file.py:function`` makes one.
        loss: As for ``apply``, or ``file.py:function``.
        optimizer: The function that ``plan.recipe.optimizer`` names.
        steps: Optimizer steps, at least 3.
        device: ``"cuda"`` or ``"cpu"``; CUDA if left out.
        fresh_process: Run them in a subprocess with a new CUDA context and allocator.
            The model must be one that is given as text.
        trust_remote_code: Let a hub model's own code run.
        progress: Called with a line of text for each longer piece of work.

    Raises:
        InputError: No CUDA device and none asked for, too few steps, or another model.
    """
    check_plan(plan)
    steps = python_number(steps)
    if fresh_process:
        return verify_in_subprocess(
            plan,
            model_reference(plan, model, batch=batch, functions=(loss, optimizer)),
            steps=steps,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    undo = Undo()
    try:
        live = resolve_model_and_batch(
            plan,
            attach_planned_adapter(plan, model, undo),
            batch=batch,
            loss=loss,
            optimizer=optimizer,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        return verify_plan(plan, live, steps=steps, progress=progress)
    finally:
        undo()
