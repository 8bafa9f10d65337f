"""Explain that a backward left parameters out, which ranks reduce together."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from budgetfit.applying.ranks import Ranks
from budgetfit.applying.reduction import have_gradients
from budgetfit.errors import InputError, TraceError

_SHOWN = 3
_BY_DDP = "DDP reduces all of them on all ranks"


def check_all_reduced(wrapped: nn.Module | None) -> None:
    """Check that DDP has reduced the gradients of all parameters, if it had to."""
    # Otherwise other ranks wait for this one, and DDP itself reports it in the next
    # forward, with advice for who has made it.
    if not isinstance(wrapped, DistributedDataParallel):
        return
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        raise InputError(
            f"{_explanation(*_left_out(wrapped), 'on this rank', _BY_DDP)} Then start "
            "all ranks anew: they wait for each other."
        ) from error


def check_all_used(wrapped: nn.Module | None) -> None:
    """Check in a trace that DDP would reduce all parameters in the first micro-batch.

    Raises:
        TraceError: If not; names the parameters without a gradient.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    names, count = _left_out(wrapped)
    if names:
        said = _explanation(names, count, "in the traced step", _BY_DDP)
        raise TraceError(
            f'{said} Or use engine="fsdp2", where all ranks may leave out the same '
            "modules.",
            module=names[0].rpartition(".")[0],
            op="",
        )


def check_same_on_ranks(wrapped: nn.Module, ranks: Ranks) -> None:
    """Check that all ranks have gradients of the same parameters; under DDP of all."""
    # Each rank reduces its own one after the other: another's would be added to them.
    is_ddp = isinstance(wrapped, DistributedDataParallel)
    grads = have_gradients(wrapped)
    share = ranks.mean(torch.tensor(list(grads.values()), dtype=torch.float64))
    same = {1.0} if is_ddp else {0.0, 1.0}
    pairs = zip(grads, share.tolist(), strict=True)
    names = [name for name, of_ranks in pairs if of_ranks not in same]
    if names:
        why = _BY_DDP if is_ddp else "fully_shard reduces the same ones on all ranks"
        raise InputError(_explanation(names, len(grads), "on a rank or more", why))


def _left_out(wrapped: nn.Module) -> tuple[list[str], int]:
    """Return trainable parameters without a gradient, and how many are trainable."""
    grads = have_gradients(wrapped)
    return [name for name in grads if not grads[name]], len(grads)


def _explanation(names: list[str], count: int, where: str, why: str) -> str:
    which = "some trainable parameters"
    # All of them where gradients were dropped, or freed by the backward itself.
    if 0 < len(names) < count:
        more = ", ..." * (len(names) > _SHOWN)
        which = (
            f"{len(names)} of {count} trainable parameters "
            f"({', '.join(names[:_SHOWN])}{more})"
        )
    return (
        f"The backward gave {which} no gradient {where}, and {why}. Use every "
        "module in each step (an expert without tokens on an empty input, or add 0 * "
        "the sum of its parameters to the output), and freeze what never trains with "
        "requires_grad_(False)."
    )
