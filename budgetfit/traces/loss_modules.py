"""Modules captured by a loss function: a frozen teacher, a perceptual network.

They are on the GPU like the model, so a trace runs fake copies of them and counts their
weights. ``swap_modules`` says where they are looked for.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from budgetfit.traces.swap_modules import (
    modules_in,
    replace_modules,
    trainable_tensors_in,
)
from budgetfit.tracing.fake.model_copy import fake_copy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    from budgetfit.traces.swap_modules import Swap


class FakedLoss:
    """A loss function that runs fake copies of its modules once ``fake`` was called.

    Attributes:
        loss: What the traced program calls; the user's own until ``fake``.
    """

    def __init__(self, loss: Callable[..., Any] | None, model: nn.Module) -> None:
        self.loss = loss
        self._real = loss
        self._model = model

    def fake(self, mode: FakeTensorMode, fake_model: nn.Module) -> Sequence[nn.Module]:
        """Make fake copies of the loss's own modules and return them."""
        # Submodules of the model become those of the same name in ``fake_model``, so
        # that a loss that reads the model's weights reads the traced ones.
        if self._real is None:
            return ()
        names = {module: name for name, module in self._model.named_modules()}
        parts = dict(fake_model.named_modules())
        made: dict[nn.Module, nn.Module] = {}

        def swap(module: nn.Module) -> nn.Module:
            if module in names:
                return parts.get(names[module], module)
            if module not in made:
                if any(part in names for part in module.modules()):
                    return _copy_with_children(module, swap)
                made[module] = fake_copy(module, mode)
            return made[module]

        self.loss = replace_modules(self._real, swap)
        return tuple(made.values())


def loss_only_modules(
    loss: Callable[..., Any] | None, model: nn.Module
) -> tuple[nn.Module, ...]:
    """Return the modules that a loss runs and that are not part of the model."""
    own = set(model.modules())
    return tuple(
        module for module in modules_in(loss) if own.isdisjoint(module.modules())
    )


@contextlib.contextmanager
def loss_modules_on(
    device: torch.device, loss: Callable[..., Any] | None, model: nn.Module
) -> Iterator[tuple[nn.Module, ...]]:
    """Move the loss's own modules to a device, and back on exit."""
    modules = loss_only_modules(loss, model)
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
    """Return notes on the modules that only the loss runs."""
    return tuple(
        f"the loss runs a {type(module).__name__} of "
        f"{sum(p.numel() for p in module.parameters()):,} parameters: counted, as it "
        "must be on the card, too"
        for module in loss_only_modules(loss, model)
    )


def warn_of_trainable_loss(loss: Callable[..., Any] | None, model: nn.Module) -> None:
    """Warn of trainable parameters in the loss: no optimizer updates them."""
    found: list[tuple[str, list[torch.Tensor]]] = [
        (f"a {type(module).__name__}", list(module.parameters()))
        for module in loss_only_modules(loss, model)
    ]
    own = set(model.parameters())
    others = [each for each in trainable_tensors_in(loss) if each not in own]
    found.append(("tensors that it refers to", others))
    for where, tensors in found:
        count = sum(each.numel() for each in tensors if each.requires_grad)
        if count:
            warnings.warn(
                f"The loss has {count:,} trainable parameters in {where}, and no "
                "optimizer of the run has them: they stay as they are. Freeze them "
                "(requires_grad_(False)), or make the loss a part of the model.",
                stacklevel=4,
            )


def _copy_with_children(module: nn.Module, swap: Swap) -> nn.Module:
    """Copy a module that contains the model, with its children swapped."""
    copied = copy.copy(module)
    copied._modules = {  # noqa: SLF001 - as Module.__setstate__ does
        name: child if child is None else swap(child)
        for name, child in module._modules.items()  # noqa: SLF001
    }
    return copied
