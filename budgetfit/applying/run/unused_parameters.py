"""Explain DDP's error after a backward that left parameters out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from budgetfit.errors import InputError

if TYPE_CHECKING:
    from torch import nn

_SHOWN = 3


def check_all_reduced(wrapped: nn.Module | None) -> None:
    """Check that DDP has reduced the gradients of all parameters, if it had to.

    Otherwise other ranks wait for this one, and DDP itself reports it in the next
    forward, with advice for who has made it.

    Raises:
        InputError: If not; names the parameters without a gradient.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        raise InputError(_explanation(wrapped.module)) from error


def _explanation(model: Any) -> str:
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    names = [name for name, grad in grads.items() if grad is None]
    which = "some trainable parameters"
    # All of them where gradients were dropped, or freed by the backward itself.
    if 0 < len(names) < len(grads):
        more = ", ..." * (len(names) > _SHOWN)
        which = (
            f"{len(names)} of {len(grads)} trainable parameters "
            f"({', '.join(names[:_SHOWN])}{more})"
        )
    return (
        f"The backward gave {which} no gradient on this rank, and DDP reduces all of "
        "them on all ranks. Use every module in each step (an expert without tokens "
        "on an empty input, or add 0 * the sum of its parameters to the output), and "
        "freeze what never trains with requires_grad_(False). Then start all ranks "
        "anew: they wait for each other."
    )
