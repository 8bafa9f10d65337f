"""Modules that only a loss reaches: a frozen teacher, a perceptual network.

They are on the card like the model, so a trace runs fake copies of them and counts
their weights. ``swap_modules`` says where they are looked for.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import TYPE_CHECKING, Any

from budgetfit.traces.swap_modules import modules_in, swapped
from budgetfit.tracing.fake.model_copy import fake_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    from budgetfit.traces.swap_modules import Swap


class FakedLoss:
    """A loss, and the same one on fake copies of the modules that it runs.

    Attributes:
        loss: What the traced program calls; the user's own until ``fake``.
    """

    def __init__(self, loss: Callable[..., Any] | None, model: nn.Module) -> None:
        self.loss = loss
        self._real = loss
        self._model = model

    def fake(self, mode: FakeTensorMode, twin: nn.Module) -> Sequence[nn.Module]:
        """Make the fake copies and return them: they are weights beside the model's.

        What belongs to the model becomes the twin's part of that name, so that a loss
        that looks at the model's weights looks at those that are traced.
        """
        if self._real is None:
            return ()
        names = {module: name for name, module in self._model.named_modules()}
        parts = dict(twin.named_modules())
        made: dict[nn.Module, nn.Module] = {}

        def swap(module: nn.Module) -> nn.Module:
            if module in names:
                return parts.get(names[module], module)
            if module not in made:
                if any(part in names for part in module.modules()):
                    return _around(module, swap)
                made[module] = fake_copy(module, mode)
            return made[module]

        self.loss = swapped(self._real, swap)
        return tuple(made.values())


def modules_beside(
    loss: Callable[..., Any] | None, model: nn.Module
) -> tuple[nn.Module, ...]:
    """Return the modules that a loss runs and that are no part of the model."""
    own = set(model.modules())
    return tuple(
        module for module in modules_in(loss) if own.isdisjoint(module.modules())
    )


@contextlib.contextmanager
def loss_modules_on(
    device: torch.device, loss: Callable[..., Any] | None, model: nn.Module
) -> Iterator[tuple[nn.Module, ...]]:
    """Have what a loss runs beside the model on a device, and back where it was."""
    modules = modules_beside(loss, model)
    homes = [
        next((tensor.device for tensor in module.state_dict().values()), device)
        for module in modules
    ]
    for module in modules:
        module.to(device)
    try:
        yield modules
    finally:
        for module, home in zip(modules, homes, strict=True):
            module.to(home)


def loss_notes(loss: Callable[..., Any] | None, model: nn.Module) -> tuple[str, ...]:
    """Say which modules beside the model a loss runs."""
    return tuple(
        f"the loss runs a {type(module).__name__} of "
        f"{sum(p.numel() for p in module.parameters()):,} parameters: counted, as it "
        "must be on the card, too"
        for module in modules_beside(loss, model)
    )


def warn_of_trainable_loss(loss: Callable[..., Any] | None, model: nn.Module) -> None:
    """Warn of parameters beside the model that a loss would train."""
    for module in modules_beside(loss, model):
        count = sum(p.numel() for p in module.parameters() if p.requires_grad)
        if count:
            warnings.warn(
                f"The loss has {count:,} trainable parameters in a "
                f"{type(module).__name__}, and no optimizer of the run has them: they "
                "stay as they are. Freeze them (requires_grad_(False)), or make the "
                "loss a part of the model.",
                stacklevel=4,
            )


def _around(module: nn.Module, swap: Swap) -> nn.Module:
    """Copy a module that contains the model, with its children swapped."""
    copied = copy.copy(module)
    copied._modules = {  # noqa: SLF001 - as Module.__setstate__ does
        name: child if child is None else swap(child)
        for name, child in module._modules.items()  # noqa: SLF001
    }
    return copied
