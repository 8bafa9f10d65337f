"""Set up a Run: device of the model, optimizer argument, change of recipe."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from budgetfit.applying.undo import Undo
from budgetfit.core.recipe import Recipe
from budgetfit.errors import InputError
from budgetfit.utils.function_name import qualified_name


def move_model(
    model: nn.Module,
    device: torch.device | str | None,
    undo: Undo,
    *,
    by_wrapper: bool = False,
) -> torch.device:
    """Move the model to ``device``; None is the device of most of its weights.

    With ``by_wrapper`` it stays where it is: ``fully_shard`` moves it, in parts.

    Raises:
        InputError: If its weights are on meta or inference tensors.
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise InputError(
            "The model was made under torch.inference_mode(), and such weights cannot "
            "train. Make or load it outside of it."
        )
    elements_on: dict[torch.device, int] = defaultdict(int)
    for parameter in model.parameters():
        elements_on[parameter.device] += parameter.numel()
    if any(home.type == "meta" for home in elements_on):
        raise InputError(
            "The model is on the meta device: it has no weights to train. Load them "
            "first, for example with AutoModelForCausalLM.from_pretrained(...)."
        )
    home = max(elements_on, key=elements_on.__getitem__, default=torch.device("cpu"))
    if device is None:
        return home
    wanted = torch.device(device)
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())
    if home != wanted and not by_wrapper:
        undo.add(model.to, home)
        model.to(wanted)
    return wanted


def resolve_optimizer(
    name: str, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> str | Callable[..., torch.optim.Optimizer]:
    """Return the optimizer callable, or the recipe's name; refuse any other."""
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


def check_adoptable(before: Recipe, after: Recipe, *, waiting: int) -> None:
    """Refuse a new recipe with another optimizer or precision (``Run.adopt``)."""
    if not isinstance(after, Recipe):
        raise InputError(
            "There is no recipe to go on with: no smaller micro-batch is left. Plan "
            "again with less memory, or for shorter samples."
            if after is None
            else f"A Recipe is expected, not a {type(after).__name__}: for example "
            "run.adopt(plan.recipe)."
        )
    for name in ("precision", "optimizer", "optimizer_in_backward", "parallelism"):
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
