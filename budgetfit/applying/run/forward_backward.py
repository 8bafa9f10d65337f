"""Forward, loss scaling and backward of one micro-batch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from budgetfit.applying.loss.call_model import compute_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from budgetfit.applying.loss.call_model import Loss


def forward_backward(  # noqa: PLR0913 - one value each, all needed
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None,
    divisor: float,
    contexts: Iterable[AbstractContextManager[object]],
    scaler: torch.amp.GradScaler | None,
    before_backward: Callable[[], object],
    on_missing_loss: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Accumulate the gradients of a micro-batch's loss / ``divisor``.

    Args:
        model: In training mode.
        batch: On the model's device, in its dtypes.
        loss: See ``call_model.compute_loss``.
        divisor: Of the loss; see ``AccumulationGroup.divisor``.
        contexts: Entered for forward and loss, not for backward.
        scaler: Scales the loss; None without one.
        before_backward: Called after the outputs are freed.
        on_missing_loss: See ``call_model.compute_loss``.

    Returns:
        The loss as the model computed it, detached.
    """
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        value = compute_loss(model, batch, loss, on_missing_loss=on_missing_loss)
    # On CUDA some losses have a storage of the size of their input (mse_loss): copy and
    # division, also by 1, release it.
    reported = value.detach().clone()
    value = value / divisor
    if scaler is not None:
        value = scaler.scale(value)
    before_backward()
    value.backward()
    return reported
