"""Whether an optimizer trains flat parts of weights as it trains the weights."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from budgetfit.errors import InputError

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_SIDE, _STEPS = 16, 2
_EQUAL = 1e-3  # of how far the weights have moved
_COMPILES = "torchao"  # its steps: for seconds, and each element is updated alone


def refuse_if_by_shape(make: Make, name: str) -> None:
    """Refuse an optimizer that DeepSpeed's flat parts of the weights train otherwise.

    A matrix is trained whole and in two flat parts. Adafactor has means of rows and
    columns, and LAMB norms of whole weights.

    Raises:
        InputError: If the parts end elsewhere, or it takes matrices alone.
    """
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        if _is_alike(make):
            return
    raise InputError(
        f"DeepSpeed hands flat parts of the weights to the optimizer, and {name} "
        "trains a matrix by more than each of its elements: it would train otherwise "
        "than in one process. Use one that does not, such as "
        'optimizer="adamw_torch_fused", or engine="ddp".'
    )


def _is_alike(make: Make) -> bool:
    """Whether both are trained alike; also where the optimizer does not run here."""
    generator = torch.Generator().manual_seed(0)
    start, *slopes = torch.randn(1 + _STEPS, _SIDE, _SIDE, generator=generator)
    try:
        whole = _trained(make, [start], [[each] for each in slopes])
    except Exception:  # noqa: BLE001 - the step itself tells
        return True
    if whole is None:
        return True
    start = start.flatten()
    try:
        parts = _trained(
            make, start.chunk(2), [each.flatten().chunk(2) for each in slopes]
        )
    except (RuntimeError, ValueError):  # it takes matrices
        return False
    moved = (whole - start).norm()
    return parts is not None and bool((parts - whole).norm() <= _EQUAL * moved)


def _trained(
    make: Make,
    start: Iterable[torch.Tensor],
    slopes: Iterable[Iterable[torch.Tensor]],
) -> torch.Tensor | None:
    """Return parameters after steps with these gradients, flat and joined."""
    parameters = [nn.Parameter(each.clone()) for each in start]
    optimizer = make(parameters)
    if type(optimizer).__module__.partition(".")[0] == _COMPILES:
        return None
    for gradients in slopes:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in parameters])
