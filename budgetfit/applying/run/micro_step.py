"""Forward and backward of one micro-batch, in the order of applying P4."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from budgetfit.applying.loss.call_model import loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from budgetfit.applying.loss.call_model import Loss


def forward_backward(  # noqa: PLR0913 - one value each, all needed
    model: nn.Module,
    batch: Any,  # noqa: ANN401 - any nesting of tensors
    *,
    loss: Loss | None,
    divisor: float,
    contexts: Iterable[AbstractContextManager[object]],
    scaler: torch.amp.GradScaler | None,
    before_backward: Callable[[], object],
    no_loss: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Add the gradients of a micro-batch's loss / ``divisor`` to the weights'.

    Args:
        model: In training mode.
        batch: On the model's device, in its dtypes.
        loss: See ``call_model.loss_of``.
        divisor: How many micro-batches the mean is over, or what stands for it.
        contexts: Entered around forward and loss, never around backward.
        scaler: Scales the loss; None without one.
        before_backward: Called when the outputs are gone.
        no_loss: See ``call_model.loss_of``.

    Returns:
        The loss as the model computed it, detached.
    """
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        value = loss_of(model, batch, loss, no_loss=no_loss)
    # On CUDA some losses come in a storage of the size of their input (mse_loss does):
    # the copy and the division, by 1 too, leave it behind.
    reported = value.detach().clone()
    value = value / divisor
    if scaler is not None:
        value = scaler.scale(value)
    before_backward()
    value.backward()
    return reported
