"""What a Run does to a model before its first step: device, mode, optimizer."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.utils.function_name import qualified_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from budgetfit.applying.undo import Undo


def move(
    model: nn.Module, device: torch.device | str | None, undo: Undo
) -> torch.device:
    """Bring the model to ``device``; None leaves it where most of its weights are.

    Raises:
        InputError: If the model has no weights, or none that can train.
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise InputError(
            "The model was made under torch.inference_mode(), and such weights cannot "
            "train. Make or load it outside of it."
        )
    homes: dict[torch.device, int] = defaultdict(int)
    for parameter in model.parameters():
        homes[parameter.device] += parameter.numel()
    if any(home.type == "meta" for home in homes):
        raise InputError(
            "The model is on the meta device: it has no weights to train. Load them "
            "first, for example with AutoModelForCausalLM.from_pretrained(...)."
        )
    home = max(homes, key=homes.__getitem__, default=torch.device("cpu"))
    if device is None:
        return home
    wanted = torch.device(device)
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())
    if home != wanted:
        undo.add(model.to, home)
        model.to(wanted)
    return wanted


def same_optimizer(
    name: str, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> str | Callable[..., torch.optim.Optimizer]:
    """Return the callable if it is the recipe's, or the recipe's name.

    Raises:
        InputError: If it is another one, or none.
    """
    if optimizer is None:
        return name
    if not callable(optimizer):
        raise InputError(
            f"optimizer must be a function of the parameters, not a "
            f"{type(optimizer).__name__}; for example optimizer=torch.optim.AdamW."
        )
    handed_in = qualified_name(optimizer)
    if handed_in != name:
        raise InputError(
            f"The recipe was made for the optimizer {name!r}, but {handed_in!r} was "
            "handed in. Hand in the same one, or make the recipe with "
            f"optimizer={handed_in!r}."
        )
    return optimizer


def same_training(before: Recipe, after: Recipe, *, waiting: int) -> None:
    """Refuse to go on with a recipe that would need another optimizer or dtypes.

    Raises:
        InputError: As said, or if ``waiting`` micro-batches wait for an update.
    """
    if not isinstance(after, Recipe):
        raise InputError(
            "There is no recipe to go on with: no smaller micro-batch is left. Plan "
            "again with less memory, or for shorter samples."
            if after is None
            else f"A Recipe is expected, not a {type(after).__name__}: for example "
            "run.adopt(plan.recipe)."
        )
    for name in ("precision", "optimizer", "optimizer_in_backward"):
        if getattr(before, name) != getattr(after, name):
            raise InputError(
                f"A run cannot change its {name} from {getattr(before, name)!r} to "
                f"{getattr(after, name)!r} while it trains. Undo it and apply the "
                "other plan to the model."
            )
    if waiting:
        raise InputError(
            f"{waiting} micro-batches wait for an update. Call run.flush() first, or "
            "adopt other settings when run.updated is True."
        )
