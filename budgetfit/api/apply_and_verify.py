"""apply and verify: a plan carried out on real tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from budgetfit.applying.optimizers.factory import LEARNING_RATE, OPTIMIZER_NAMES
from budgetfit.applying.run.run import Run
from budgetfit.applying.torch_compile import without_wrapper
from budgetfit.core.plan import Plan, Verification
from budgetfit.errors import InputError
from budgetfit.inputs.attached_adapter import planned_adapters, put_on, take_off_last
from budgetfit.inputs.plan_source import (
    dims_of,
    functions_of,
    live_program,
    model_as_text,
    model_to_train,
)
from budgetfit.measuring.subprocess_run import verify_in_fresh_process
from budgetfit.traces.loss_modules import warn_of_trainable_loss
from budgetfit.tracing.isolation.torch_state import undisturbed
from budgetfit.verification.verify_plan import verify_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

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
            plan with adapters puts them on a plain model, and ``undo`` takes them off.
        loss: Needed where the plan was made with one and loaded; so is ``optimizer``.
        optimizer: The function that ``plan.recipe.optimizer`` names.
        learning_rate: Of an optimizer that the plan has by name; 5e-5, transformers'
            default, if left out. A function sets its own.

    Returns:
        What trains; ``run.step(batch)`` for each micro-batch, ``run.undo()`` for the
        plain model. Of a model under ``torch.compile`` it trains the eager one, with a
        warning, unless the plan keeps everything.

    Raises:
        InputError: If there is no model, it is not the one that was planned, or a
            learning rate cannot be used.
    """
    _check_learning_rate(plan, learning_rate)
    if model is not None and isinstance(plan, Plan):
        model = without_wrapper(model, plan.recipe)
    model, put_back = put_on(plan, model)
    try:
        model = model_to_train(plan, model)
        loss, optimizer = functions_of(plan, loss, optimizer)
        warn_of_trainable_loss(loss, model)
        run = Run(
            model,
            plan.recipe,
            loss=loss,
            optimizer=optimizer,
            learning_rate=LEARNING_RATE if learning_rate is None else learning_rate,
            plan=plan,
            dims=dims_of(plan, model),
        )
    except BaseException:
        put_back()
        raise
    return take_off_last(run, put_back)


def _check_learning_rate(plan: Plan, learning_rate: float | None) -> None:
    if learning_rate is None:
        return
    if not isinstance(learning_rate, (int, float)) or not 0 < learning_rate < math.inf:
        raise InputError(
            f"learning_rate must be a number above 0, got {learning_rate!r}."
        )
    if isinstance(plan, Plan) and plan.recipe.optimizer not in OPTIMIZER_NAMES:
        raise InputError(
            f"The plan's optimizer is a function, {plan.recipe.optimizer}, which sets "
            "its own learning rate. Leave learning_rate= out."
        )


@undisturbed()
def verify(  # noqa: PLR0913 - the contract of interface 2.1
    plan: Plan,
    model: nn.Module | str | None = None,
    *,
    batch: Any = None,  # noqa: ANN401
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
        fresh_process: Run them in a process of its own, whose CUDA context and
            allocator nothing has used. The model must be one that text builds.
        trust_remote_code: Let a hub model's own code run.
        progress: Called with a line for each longer piece of work.

    Raises:
        InputError: No CUDA device and none asked for, too few steps, or another model.
    """
    if fresh_process:
        return verify_in_fresh_process(
            plan,
            model_as_text(plan, model, batch=batch, functions=(loss, optimizer)),
            steps=steps,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    with planned_adapters(plan, model) as adapted:
        live = live_program(
            plan,
            adapted,
            batch=batch,
            loss=loss,
            optimizer=optimizer,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        return verify_plan(plan, live, steps=steps, progress=progress)
